{{- define "inlay.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "inlay.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "inlay.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "inlay.selector" -}}
app.kubernetes.io/name: {{ include "inlay.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "inlay.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "inlay.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* An image reference; call with (dict "root" $ "image" .image). */}}
{{- define "inlay.image" -}}
{{- $given := default dict .image -}}
{{- $all := .root.Values.image -}}
{{- $repository := default $all.repository $given.repository -}}
{{- $digest := default (ternary "" $all.digest (not (empty $given.repository))) $given.digest -}}
{{- if $digest -}}
{{ printf "%s@%s" $repository $digest }}
{{- else -}}
{{ printf "%s:%s" $repository (default .root.Chart.AppVersion (default $all.tag $given.tag)) }}
{{- end -}}
{{- end -}}

{{- define "inlay.secretName" -}}
{{- printf "%s-secrets" (include "inlay.fullname" .) -}}
{{- end -}}

{{/* Settings and their defaults of one pool; call with (dict "root" $ "pool" .). */}}
{{- define "inlay.pool" -}}
{{- mergeOverwrite (deepCopy .root.Values.workerDefaults) (deepCopy .pool) | toYaml -}}
{{- end -}}

{{/* The members' URLs of NATS. */}}
{{- define "inlay.natsUrls" -}}
{{- if .Values.nats.enabled -}}
{{- printf "nats://inlay:$(NATS_PASSWORD)@%s-nats:4222" (include "inlay.fullname" .) -}}
{{- else -}}
{{- join " " .Values.nats.external.urls -}}
{{- end -}}
{{- end -}}


{{/* True where some pool's model is a name on the hub. */}}
{{- define "inlay.usesHub" -}}
{{- range .Values.workers -}}
{{- $model := default dict .model -}}
{{- if not $model.volume -}}hub {{ end -}}
{{- end -}}
{{- end -}}

{{/* The way of members to NATS, as an egress rule. */}}
{{- define "inlay.egressToNats" -}}
{{- if .Values.nats.enabled -}}
- ports: [{port: 4222}]
  to:
    - podSelector:
        matchLabels:
          {{- include "inlay.selector" . | nindent 10 }}
          app.kubernetes.io/component: nats
{{- else -}}
- ports:
    {{- range .Values.nats.external.urls }}
    - {port: {{ default "4222" (regexFind "[0-9]+$" (trimSuffix "/" .)) }}}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* The way of members to the collector of traces, as an egress rule; nothing without one. */}}
{{- define "inlay.egressToCollector" -}}
{{- with .Values.fleet.otlpTracesEndpoint }}
{{- $host := (urlParse .).host -}}
- ports: [{port: {{ default (ternary "443" "80" (hasPrefix "https:" .)) (trimPrefix ":" (regexFind ":[0-9]+$" $host)) }}}]
{{- end }}
{{- end -}}
