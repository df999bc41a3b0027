{{- define "kvspray.name" -}}
{{- default .Release.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "kvspray.selector" -}}
app.kubernetes.io/name: kvspray
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvspray.labels" -}}
{{ include "kvspray.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kvspray.image" -}}
{{ .image.repository }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- end }}

{{- define "kvspray.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.runAsUser }}
runAsGroup: {{ int64 .Values.runAsUser }}
fsGroup: {{ int64 .Values.runAsUser }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvspray.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{/* Topology spread constraints of a component; those without a selector select its pods. */}}
{{- define "kvspray.spread" -}}
{{- $selector := dict "labelSelector" (dict "matchLabels" (include "kvspray.selector" . | fromYaml)) }}
{{- range .constraints }}
- {{ merge (deepCopy .) $selector | toJson }}
{{- end }}
{{- end }}

{{/* "true" if the router finds engines by the sidecars' membership. */}}
{{- define "kvspray.joins" -}}
{{- if and .Values.router.join (not .Values.keys.certManager.enabled) (ne .Values.sidecar.placement "node") }}true{{ end -}}
{{- end }}

{{/* The container of `kvspray serve`; role: that of its engine, which answers clients; empty: none does. */}}
{{- define "kvspray.sidecar" -}}
name: kvspray
image: {{ include "kvspray.image" (dict "root" .root "image" .root.Values.image) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args:
  - serve
  - --config=/etc/kvspray/config/kvspray.yaml
  - --socket=/run/kvspray/kvspray.sock
  - --listen=$(POD_IP):7650
  - --http=$(POD_IP):7651
  - --set=node=$(POD_NAME)
  - --set=transports.tcp.rails=pod@$(POD_IP):7653
  {{- if .root.Values.keys.certManager.enabled }}
  - --set=peer.advertise=$(POD_NAME).{{ .subdomain }}.$(POD_NAMESPACE).svc:7650
  {{- else }}
  - --set=peer.gossip.listen=$(POD_IP):7652
  {{- end }}
  {{- if and .role (include "kvspray.joins" .root) }}
  - --set=engine.api=http://$(POD_IP):{{ .root.Values.engine.port }}
  - --set=engine.role={{ .role }}
  {{- end }}
env:
  - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  - {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
ports:
  - {name: peer, containerPort: 7650}
  - {name: metrics, containerPort: 7651}
  - {name: gossip, containerPort: 7652}
  - {name: gossip-udp, containerPort: 7652, protocol: UDP}
  - {name: data, containerPort: 7653}
startupProbe: {httpGet: {path: /readyz, port: metrics}, periodSeconds: 1, failureThreshold: {{ int .root.Values.engine.startupSeconds }}}
livenessProbe: {httpGet: {path: /healthz, port: metrics}, periodSeconds: 10, timeoutSeconds: 3}
readinessProbe: {httpGet: {path: /readyz, port: metrics}, periodSeconds: 5, timeoutSeconds: 3}
securityContext:
  {{- include "kvspray.containerSecurity" . | nindent 2 }}
  readOnlyRootFilesystem: true
{{- $resources := deepCopy .root.Values.sidecar.resources }}
{{- if .root.Values.rdma.enabled }}
{{- $nics := dict .root.Values.rdma.resource (toString .root.Values.rdma.count) }}
{{- $resources = merge $resources (dict "limits" $nics "requests" $nics) }}
{{- end }}
resources: {{ toJson $resources }}
volumeMounts:
  - {name: socket, mountPath: /run/kvspray}
  - {name: config, mountPath: /etc/kvspray/config, readOnly: true}
  - {name: keys, mountPath: /etc/kvspray/keys, readOnly: true}
  {{- if .root.Values.store.disk.size }}
  - {name: store, mountPath: /var/lib/kvspray}
  {{- end }}
{{- end }}

{{/* The volumes of that container, without the socket's. */}}
{{- define "kvspray.sidecarVolumes" -}}
- {name: config, configMap: {name: {{ include "kvspray.name" .root }}-sidecar}}
{{- with .root.Values.keys }}
{{- if .certManager.enabled }}
- name: keys
  csi:
    driver: csi.cert-manager.io
    readOnly: true
    volumeAttributes:
      csi.cert-manager.io/issuer-name: {{ required "keys.certManager.issuerName is empty" .certManager.issuerName | quote }}
      csi.cert-manager.io/issuer-kind: {{ .certManager.issuerKind | quote }}
      csi.cert-manager.io/issuer-group: {{ .certManager.issuerGroup | quote }}
      csi.cert-manager.io/dns-names: ${POD_NAME}.{{ $.subdomain }}.${POD_NAMESPACE}.svc
      csi.cert-manager.io/key-usages: digital signature,server auth,client auth
      csi.cert-manager.io/fs-group: {{ int64 $.root.Values.runAsUser | quote }}
{{- else }}
- {name: keys, secret: {secretName: {{ required "keys: name a secret in keys.existingSecret (kvspray keygen cluster), or enable keys.certManager" .existingSecret }}, defaultMode: 0440}}
{{- end }}
{{- end }}
{{- with .root.Values.store.disk }}
{{- if .size }}
- {{ merge (dict "name" "store") .volume | toJson }}
{{- end }}
{{- end }}
{{- end }}

{{/* The headless service of a role's pods: a LeaderWorkerSet makes its own. */}}
{{- define "kvspray.subdomain" -}}
{{- $kind := (index .root.Values .role).kind -}}
{{ include "kvspray.name" .root }}-{{ eq $kind "LeaderWorkerSet" | ternary .role "engines" }}
{{- end }}

{{- define "kvspray.drainSeconds" -}}
{{- with .Values.drain }}{{ add .routerSeconds .engineSeconds .sidecarSeconds 10 }}{{ end -}}
{{- end }}
