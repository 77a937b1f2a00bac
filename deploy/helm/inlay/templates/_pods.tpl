{{/* Security of every pod and container. */}}
{{- define "inlay.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.runAsUser }}
fsGroup: {{ .Values.runAsUser }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "inlay.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Labels of a pod; call with (dict "root" $ "component" "frontend" "own" .podLabels). */}}
{{- define "inlay.podLabels" -}}
{{ include "inlay.labels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with merge (deepCopy (default dict .own)) .root.Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What a component's values add to its pods; call with the values of the component. */}}
{{- define "inlay.podExtras" -}}
{{- range $key := list "schedulerName" "dnsPolicy" "dnsConfig" "resourceClaims" }}
{{- with get $ $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The first fields of every pod's spec. No links: Kubernetes would set variables that begin with
INLAY_ for the Services of a release of that name, and inlay refuses those it does not know. */}}
{{- define "inlay.podSpec" -}}
enableServiceLinks: false
automountServiceAccountToken: false
serviceAccountName: {{ default (include "inlay.account" .) .serviceAccountName }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "inlay.podSecurity" . | nindent 2 }}
{{- end -}}

{{/* Where a pod may run; call with the values of the component. */}}
{{- define "inlay.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Call with (dict "spread" .topologySpread "labels" "YAML of labels"). */}}
{{- define "inlay.spread" -}}
{{- if .spread.enabled }}
topologySpreadConstraints:
  - maxSkew: {{ .spread.maxSkew }}
    topologyKey: {{ .spread.topologyKey }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- .labels | nindent 8 }}
{{- end }}
{{- end -}}

{{/* Environment of frontends and workers: who they are, and the way to NATS. */}}
{{- define "inlay.memberEnv" -}}
- name: INLAY_CONFIG
  value: /etc/inlay/config/inlay.yaml
- {name: INLAY_LOG_FORMAT, value: {{ .Values.fleet.logFormat }}}
- name: HOME
  value: /var/cache/inlay
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: INLAY_NATS
  value: {{ include "inlay.natsUrls" . | quote }}
{{- end -}}

{{/* Keys of the config file that all members have. Words in `config` win. */}}
{{- define "inlay.memberConfig" -}}
namespace: {{ .Values.fleet.name }}
nats-wait: 60
log-level: {{ .Values.fleet.logLevel }}
secret-file: /etc/inlay/fleet/root-secret
{{- with .Values.fleet.otlpTracesEndpoint }}
otlp-traces-endpoint: {{ . }}
{{- end }}
{{- if .Values.nats.enabled }}
nats-replicas: {{ .Values.nats.replicas }}
nats-user: inlay
nats-password-file: /etc/inlay/nats/password
{{- else }}
{{- $nats := .Values.nats.external }}
nats-replicas: {{ $nats.replicas }}
{{- with $nats.user }}
nats-user: {{ . }}
{{- end }}
{{- range $option, $key := dict "nats-password-file" $nats.passwordKey "nats-nkey-seed" $nats.nkeySeedKey "nats-creds" $nats.credsKey
    "nats-tls-ca" $nats.tlsCaKey "nats-tls-cert" $nats.tlsCertKey "nats-tls-key" $nats.tlsKeyKey }}
{{- if $key }}
{{ $option }}: /etc/inlay/nats/{{ $key }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "inlay.memberMounts" -}}
- {name: config, mountPath: /etc/inlay/config, readOnly: true}
- {name: fleet, mountPath: /etc/inlay/fleet, readOnly: true}
- {name: cache, mountPath: /var/cache/inlay}
- {name: tmp, mountPath: /tmp}
{{- if or .Values.nats.enabled .Values.nats.external.existingSecret }}
- {name: nats, mountPath: /etc/inlay/nats, readOnly: true}
{{- end }}
{{- end -}}

{{/* Secrets are readable by the group alone: inlay refuses a key file that others can read. */}}
{{- define "inlay.memberVolumes" -}}
- name: fleet
  secret:
    secretName: {{ default (include "inlay.secretName" .) .Values.fleet.secret.existingSecret }}
    defaultMode: 0440
    items: [{key: {{ .Values.fleet.secret.key }}, path: root-secret}]
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- if .Values.nats.enabled }}
- name: nats
  {{- include "inlay.natsPassword" . | nindent 2 }}
{{- else if .Values.nats.external.existingSecret }}
- name: nats
  secret: {secretName: {{ .Values.nats.external.existingSecret }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* The file `password` of the members of the chart's own NATS, as a source of a volume. */}}
{{- define "inlay.natsPassword" -}}
secret:
  secretName: {{ default (include "inlay.secretName" .) .Values.nats.auth.existingSecret }}
  defaultMode: 0440
  items: [{key: {{ .Values.nats.auth.key }}, path: password}]
{{- end -}}
