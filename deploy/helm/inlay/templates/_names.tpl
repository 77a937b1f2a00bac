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

{{/* The image of a pool; without one of its own the image of its engine, beside the frontends'. */}}
{{- define "inlay.workerImage" -}}
{{- $image := dict -}}
{{- range $key, $value := .pool.image }}{{ if $value }}{{ $_ := set $image $key $value }}{{ end }}{{ end -}}
{{- if not $image.repository -}}
{{- $engine := default "torch" (get .pool.config "engine") -}}
{{- $torch := ternary "cuda" "worker" (gt (int .pool.gpus.count) 0) -}}
{{- $suffix := get (dict "torch" $torch "echo" "worker" "vllm" "vllm") $engine -}}
{{- if not $suffix -}}
{{- fail (printf "workers: %s: image.repository is needed: there is no image for engine %s" .pool.name $engine) -}}
{{- end -}}
{{- $_ := set $image "repository" (printf "%s-%s" .root.Values.image.repository $suffix) -}}
{{- end -}}
{{- include "inlay.image" (dict "root" .root "image" $image) -}}
{{- end -}}

{{- define "inlay.secretName" -}}
{{- printf "%s-secrets" (include "inlay.fullname" .) -}}
{{- end -}}

{{/* Settings and their defaults of one pool; call with (dict "root" $ "pool" .). */}}
{{- define "inlay.pool" -}}
{{- $given := deepCopy .pool -}}
{{- $defaults := deepCopy .root.Values.workerDefaults -}}
{{- /* A volume has one source: a pool's own takes the place of the default, and is not added. */ -}}
{{- if and $given.model (get (default dict $given.model) "volume") }}{{ $_ := unset $defaults.model "volume" }}{{ end -}}
{{- if $given.cacheVolume }}{{ $_ := unset $defaults "cacheVolume" }}{{ end -}}
{{- $pool := mergeOverwrite $defaults $given -}}
{{- if not $pool.resources -}}
{{- /* The weights and as much again for cache and library on a CPU; on a GPU they pass through. */ -}}
{{- $gib := ternary 1.0 2.0 (gt (int $pool.gpus.count) 0) | mulf (float64 $pool.model.gigabytes) | addf 2.0 | ceil | int -}}
{{- $_ := set $pool "resources" (dict "requests" (dict "cpu" "2" "memory" (printf "%dGi" $gib))) -}}
{{- end -}}
{{- $pool | toYaml -}}
{{- end -}}

{{/* The members' URLs of NATS. */}}
{{- define "inlay.natsUrls" -}}
{{- if .Values.nats.enabled -}}
{{- printf "nats://%s-nats:4222" (include "inlay.fullname" .) -}}
{{- else -}}
{{- join " " .Values.nats.external.urls -}}
{{- end -}}
{{- end -}}


{{/* True where some pool's model is a name on the hub. */}}
{{- define "inlay.usesHub" -}}
{{- range .Values.workers -}}
{{- $pool := include "inlay.pool" (dict "root" $ "pool" .) | fromYaml -}}
{{- if not $pool.model.volume -}}hub {{ end -}}
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
    {{- $host := (urlParse .).host }}
    {{- $usual := get (dict "ws" "80" "wss" "443") (urlParse .).scheme | default "4222" }}
    - {port: {{ default $usual (trimPrefix ":" (regexFind ":[0-9]+$" $host)) }}}
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

{{/* The service account of pods without one of their own. */}}
{{- define "inlay.account" -}}
{{- default (include "inlay.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{/* The service account of a pool; call with (dict "root" $ "pool" $pool). */}}
{{- define "inlay.poolAccount" -}}
{{- $own := printf "%s-worker-%s" (include "inlay.fullname" .root) .pool.name -}}
{{- default (ternary $own (include "inlay.account" .root) (not (empty .pool.serviceAccount.annotations))) .pool.serviceAccount.name -}}
{{- end -}}

{{/* The port of a worker's probes: the one below those of its engines. */}}
{{- define "inlay.healthPort" -}}
{{- sub (int .Values.transport.port) 1 -}}
{{- end -}}

{{/* Bytes that JetStream may take: four fifths of its volume, so that the disk is never full. */}}
{{- define "inlay.natsStoreBytes" -}}
{{- $size := .Values.nats.persistence.size -}}
{{- $k := ternary 1024 1000 (hasSuffix "i" $size) -}}
{{- $power := get (dict "M" 2 "G" 3 "T" 4) (regexFind "[MGT]" $size) -}}
{{- $bytes := int64 (regexFind "^[0-9]+" $size) -}}
{{- range until (int $power) -}}{{- $bytes = mul $bytes $k -}}{{- end -}}
{{- div (mul $bytes 4) 5 -}}
{{- end -}}
