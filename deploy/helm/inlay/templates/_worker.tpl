{{/* Seconds in which a pool's engine must be ready; call with the pool. */}}
{{- define "inlay.startupSeconds" -}}
{{- if .startupSeconds -}}
{{ int .startupSeconds }}
{{- else -}}
{{ add 300 (mul 10 (int (ceil (float64 .model.gigabytes)))) }}
{{- end -}}
{{- end -}}

{{- define "inlay.workerPod" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $several := gt (int $pool.nodes) 1 -}}
{{- /* vLLM and SGLang start processes that share memory; a runtime gives 64 MiB. */ -}}
{{- $others := has (get $pool.config "engine") (list "vllm" "sglang") -}}
{{- $shared := default (ternary "1Gi" "" $others) $pool.sharedMemory -}}
metadata:
  labels:
    {{- include "inlay.podLabels" (dict "root" $root "component" "worker" "own" $pool.podLabels) | nindent 4 }}
    inlay/pool: {{ $pool.name }}
  annotations:
    inlay/config: {{ toYaml (list .config .arguments) | sha256sum | trunc 16 | quote }}
    {{- with merge (deepCopy $pool.podAnnotations) $root.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- $account := dict "serviceAccountName" (include "inlay.poolAccount" (dict "root" $root "pool" $pool)) }}
  {{- include "inlay.podSpec" (merge $account $root) | nindent 2 }}
  {{- include "inlay.podExtras" $pool | nindent 2 }}
  {{- include "inlay.placement" $pool | nindent 2 }}
  {{- include "inlay.spread" (dict "spread" $pool.topologySpread "labels" .selector) | nindent 2 }}
  # The drain and 15 s for the rest: they cannot disagree. Nobody reaches a worker by a Service, so
  # there is nothing to wait for before it.
  terminationGracePeriodSeconds: {{ add (ceil (float64 $pool.drainTimeout)) 15 }}
  containers:
    - name: worker
      image: {{ include "inlay.workerImage" (dict "root" $root "pool" $pool) }}
      imagePullPolicy: {{ default $root.Values.image.pullPolicy $pool.image.pullPolicy }}
      args:
        - worker
        {{- if $several }}
        - --
        {{- range .arguments }}
        - {{ . | replace "$LEADER" "$(LWS_LEADER_ADDRESS)" | quote }}
        {{- end }}
        {{- end }}
      env:
        {{- include "inlay.memberEnv" $root | nindent 8 }}
        - {name: INLAY_TRANSPORT_HOST, value: $(POD_IP)}
        {{- if $several }}
        - name: INLAY_DATA_PARALLEL_RANK
          valueFrom:
            fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}
        {{- end }}
        {{- with $pool.model.hubTokenSecret }}
        {{- if .name }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
        {{- end }}
        {{- end }}
        {{- if $pool.model.volume }}
        - {name: HF_HUB_OFFLINE, value: "1"}
        {{- end }}
        {{- with $pool.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $pool.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- $ports := max 1 (int $pool.ranks) }}
      ports:
        - {name: health, containerPort: {{ include "inlay.healthPort" $root }}}
        {{- if not $root.Values.transport.dial }}
        {{- range $rank := until (int $ports) }}
        - {name: transport-{{ $rank }}, containerPort: {{ add $root.Values.transport.port $rank }}}
        {{- end }}
        {{- end }}
        {{- range $pool.extraPorts }}
        - {name: {{ .name }}, containerPort: {{ .port }}}
        {{- end }}
      # Ready when the engine has answered its first probe. Alive while the supervising process is:
      # it watches its engine itself, and a busy one must not be killed.
      startupProbe:
        httpGet: {path: /ready, port: health}
        periodSeconds: 10
        failureThreshold: {{ div (add 9 (include "inlay.startupSeconds" $pool)) 10 }}
      readinessProbe:
        httpGet: {path: /ready, port: health}
        periodSeconds: 10
        failureThreshold: 3
      livenessProbe:
        httpGet: {path: /live, port: health}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      resources:
        {{- $resources := deepCopy $pool.resources }}
        {{- if gt (int $pool.gpus.count) 0 }}
        {{- $gpus := dict $pool.gpus.resource (int $pool.gpus.count) }}
        {{- $_ := set $resources "limits" (merge (default dict $resources.limits) $gpus) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- include "inlay.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        {{- include "inlay.memberMounts" $root | nindent 8 }}
        {{- if $pool.model.volume }}
        - {name: model, mountPath: /models/{{ $pool.name }}, readOnly: true}
        {{- end }}
        {{- if $shared }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- with $pool.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $pool.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "inlay.memberVolumes" $root | nindent 4 }}
    - name: config
      configMap: {name: {{ .name }}}
    - name: cache
      {{- if $pool.cacheVolume }}
      {{- toYaml $pool.cacheVolume | nindent 6 }}
      {{- else }}
      emptyDir: {sizeLimit: {{ $pool.cacheSize }}}
      {{- end }}
    {{- with $pool.model.volume }}
    - name: model
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $shared }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ . }}}
    {{- end }}
    {{- with $pool.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
