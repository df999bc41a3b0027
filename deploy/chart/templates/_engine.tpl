{{/* The pod of an engine: root, role, and part: "leader" or "worker" of a LeaderWorkerSet, else "". */}}
{{- define "kvspray.engine" -}}
{{- $ := .root }}
{{- $name := include "kvspray.name" $ }}
{{- $values := index $.Values .role }}
{{- $labels := dict "root" $ "component" .role }}
{{- $subdomain := include "kvspray.subdomain" . }}
{{- $byNode := eq $.Values.sidecar.placement "node" }}
{{- $worker := eq .part "worker" }}
{{- $own := dict }}
{{- $spans := false }}
{{- if .part }}
{{- $own = index $values.group .part }}
{{- with $values.group }}
{{- $spans = and (gt (int .size) 1) (not (or .leader.command .leader.args .worker.command .worker.args)) }}
{{- end }}
{{- end }}
{{- $connector := merge (deepCopy $.Values.engine.connector) (dict "socket" "/run/kvspray/kvspray.sock") }}
{{- $transfer := dict "kv_connector" "KVSprayConnector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute" "kv_connector_extra_config" $connector -}}
metadata:
  labels:
    {{- include "kvspray.labels" $labels | nindent 4 }}
    {{- if not $worker }}
    kvspray/engine: "true"
    {{- end }}
    {{- if not $byNode }}
    kvspray/sidecar: "true"
    {{- end }}
  annotations:
    kvspray/config: {{ include "kvspray.config" $ | sha256sum }}
    {{- with $values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  automountServiceAccountToken: false
  # Each side proves the end of the other's processes.
  {{- if $byNode }}
  hostPID: true
  {{- else }}
  shareProcessNamespace: true
  {{- end }}
  securityContext: {{ include "kvspray.podSecurity" $ | nindent 4 }}
  terminationGracePeriodSeconds: {{ include "kvspray.drainSeconds" $ }}
  {{- with $.Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $.Values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  {{- if not $byNode }}
  initContainers:
    - restartPolicy: Always
      {{- include "kvspray.sidecar" (dict "root" $ "subdomain" $subdomain "role" ($worker | ternary "" .role)) | nindent 6 }}
  {{- end }}
  containers:
    - name: engine
      image: {{ include "kvspray.image" (dict "root" $ "image" $.Values.engine.image) }}
      imagePullPolicy: {{ $.Values.engine.image.pullPolicy }}
      {{- with $own.command | default $.Values.engine.command }}
      command: {{ toJson . }}
      {{- end }}
      args:
        - --model={{ required "engine.model is empty: name the model, or its path in the container" $.Values.engine.model }}
        - --port={{ $.Values.engine.port }}
        - --kv-transfer-config={{ toJson $transfer }}
        {{- range concat $.Values.engine.args $values.args ($own.args | default list) }}
        - {{ toJson . }}
        {{- end }}
        {{- if $spans }}
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --master-addr=$(LWS_LEADER_ADDRESS)
        {{- if $worker }}
        - --headless
        {{- end }}
        {{- end }}
      env:
        - {name: HOME, value: /home/engine}
        {{- if not $byNode }}
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        {{- end }}
        {{- range $.Values.engine.env }}
        - {{ toJson . }}
        {{- end }}
      {{- if not $worker }}
      ports: [{name: http, containerPort: {{ $.Values.engine.port }}}]
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        failureThreshold: {{ div (add $.Values.engine.startupSeconds 9) 10 }}
      livenessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
      readinessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 5, timeoutSeconds: 5}
      {{- end }}
      {{- if $byNode }}
      lifecycle: {preStop: {sleep: {seconds: {{ $.Values.drain.routerSeconds }}}}}
      {{- else }}
      # vLLM aborts its requests at SIGTERM: routers have to choose others before, and it has to be idle.
      lifecycle:
        preStop:
          exec:
            command:
              - sh
              - -c
              - >-
                exec kvspray drain --socket=/run/kvspray/kvspray.sock --engine="http://{{ $worker | ternary "$LWS_LEADER_ADDRESS" "$POD_IP" }}:{{ $.Values.engine.port }}"
                --notice={{ $.Values.drain.routerSeconds }}s --timeout={{ add $.Values.drain.routerSeconds $.Values.drain.engineSeconds }}s
                {{- if $worker }} --ended-is-idle{{ end }}
      {{- end }}
      securityContext: {{ include "kvspray.containerSecurity" $ | nindent 8 }}
      {{- $resources := deepCopy $values.resources }}
      {{- if $values.gpus }}
      {{- $gpus := dict $.Values.gpuResource (toString $values.gpus) }}
      {{- $resources = merge $resources (dict "limits" $gpus "requests" $gpus) }}
      {{- end }}
      resources: {{ toJson $resources }}
      volumeMounts:
        - {name: socket, mountPath: /run/kvspray}
        - {name: shm, mountPath: /dev/shm}
        - {name: home, mountPath: /home/engine}
        - {name: tmp, mountPath: /tmp}
        {{- range $.Values.engine.volumeMounts }}
        - {{ toJson . }}
        {{- end }}
  volumes:
    {{- if $byNode }}
    - {name: socket, hostPath: {path: {{ $.Values.sidecar.hostPath }}, type: Directory}}
    {{- else }}
    - {name: socket, emptyDir: {}}
    {{- include "kvspray.sidecarVolumes" (dict "root" $ "subdomain" $subdomain) | nindent 4 }}
    {{- end }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $.Values.engine.sharedMemory }}}}
    - {name: tmp, emptyDir: {}}
    - {{ merge (dict "name" "home") $.Values.engine.home | toJson }}
    {{- range $.Values.engine.volumes }}
    - {{ toJson . }}
    {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector: {{ toJson . }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations: {{ toJson . }}
  {{- end }}
  {{- with $values.affinity }}
  affinity: {{ toJson . }}
  {{- end }}
  {{- with $values.topologySpreadConstraints }}
  topologySpreadConstraints: {{ include "kvspray.spread" (merge (dict "constraints" .) $labels) | nindent 4 }}
  {{- end }}
{{- end }}
