{{- define "fp8serve.selector" -}}
app.kubernetes.io/name: fp8serve
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "fp8serve.labels" -}}
{{ include "fp8serve.selector" . }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Values that do not go together, each refused in one sentence. */}}
{{- define "fp8serve.check" -}}
{{- range list "name" "instance" "component" }}
{{- $label := printf "app.kubernetes.io/%s" . }}
{{- if hasKey $.Values.labels $label }}{{ fail (printf "labels must not have %s, by which the chart selects pods." $label) }}{{ end }}
{{- end }}
{{- if regexMatch "//[^/@]*:[^/@]*@|password=" .Values.database }}{{ fail "database must have no password, which the pod's arguments would show: put it into the Secret as database-password." }}{{ end }}
{{- if eq .Values.run "job" }}
{{- if not .Values.command }}{{ fail "run: job needs command, such as [finetune, /data/model, --data=/data/chats.jsonl, --out=/data/tutor]." }}{{ end }}
{{- else }}
{{- if .Values.command }}{{ fail (printf "command is for run: job, and run is %s." .Values.run) }}{{ end }}
{{- if and (include "fp8serve.usesSqlite" .) (gt (int .Values.replicas) 1) }}{{ fail "Several replicas that run fine-tune jobs share them in a database: set database, or replicas to 1." }}{{ end }}
{{- if gt (int .Values.nodes) 1 }}
{{- if include "fp8serve.isStateful" . }}{{ fail "A server on several nodes serves the weights that it started with: leave trainOn and database out." }}{{ end }}
{{- if eq .Values.run "kserve" }}{{ fail "run: kserve is for one node; run: server divides a model among several." }}{{ end }}
{{- end }}
{{- if and (eq .Values.run "kserve") (include "fp8serve.usesSqlite" .) }}{{ fail "KServe starts a new server before it stops the old one, and they share jobs in a database only: set database, or leave trainOn out." }}{{ end }}
{{- if and (eq .Values.run "kserve") .Values.endpointPicker }}{{ fail "KServe makes its own InferencePool: leave endpointPicker out." }}{{ end }}
{{- end }}
{{- end }}

{{- /* Not empty if a server keeps jobs and active weights. */}}
{{- define "fp8serve.isStateful" -}}
{{- if or .Values.database (ne .Values.trainOn "refuse") }}true{{ end }}
{{- end }}

{{- /* Not empty if its jobs are in an SQLite file, which one server at a time can use. */}}
{{- define "fp8serve.usesSqlite" -}}
{{- if and (ne .Values.trainOn "refuse") (not .Values.database) }}true{{ end }}
{{- end }}

{{- /* The arguments of fp8serve for a server. */}}
{{- define "fp8serve.serve" -}}
{{- $ranks := mul .Values.nodes (max .Values.gpus 1) -}}
- serve
- {{ ternary "/mnt/models" .Values.model (eq .Values.run "kserve") | quote }}
- --host=0.0.0.0
- --port=8000
- {{ printf "--served-model-name=%s" .Values.name | quote }}
{{- if eq .Values.run "kserve" }}
- {{ printf "--served-model-name=publishers/%s/models/%s" .Release.Namespace .Values.name | quote }} # of its routes by model
{{- end }}
- --data-dir={{ ternary (printf "/data/server/%s" .Release.Name) "/tmp/server" (eq (include "fp8serve.isStateful" .) "true") }}
- --drain-seconds={{ int .Values.drainSeconds }}
{{- if not .Values.secret }}
- --allow-unauthenticated
{{- end }}
{{- if gt (int .Values.gpus) 0 }}
- --device=cuda
{{- end }}
{{- if gt (int $ranks) 1 }}
- --tensor-parallel={{ $ranks }}
{{- end }}
{{- if include "fp8serve.isStateful" . }}
- --train-on={{ .Values.trainOn }}
{{- end }}
{{- with .Values.database }}
- {{ printf "--database=%s" . | quote }}
{{- end }}
{{- if or .Values.endpointPicker (eq .Values.run "kserve") }}
- --vllm-metrics
{{- if .Values.secret }}
- --metrics-without-key
{{- end }}
{{- end }}
{{- with .Values.options }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The environment variables of a pod: the chart's, unless the values have one of that name, and theirs. */}}
{{- define "fp8serve.env" -}}
{{- $names := list }}
{{- range .root.Values.env }}{{ $names = append $names .name }}{{ end }}
{{- range include "fp8serve.chartEnv" . | fromYamlArray }}
{{- if not (has .name $names) }}
{{ list . | toYaml }}
{{- end }}
{{- end }}
{{- with .root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "fp8serve.chartEnv" -}}
{{- $values := .root.Values }}
{{- $isJob := eq $values.run "job" }}
{{- if .ranks }}
- { name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: {{ add (include "fp8serve.seconds" .root) 5 | quote }} } # for its processes
{{- if and $isJob (not $values.gpus) }}
- { name: OMP_NUM_THREADS, valueFrom: { resourceFieldRef: { resource: requests.cpu } } }
{{- end }}
{{- end }}
{{- if and $values.secret (not $isJob) }}
- { name: FP8SERVE_API_KEY, valueFrom: { secretKeyRef: { name: {{ $values.secret | quote }}, key: api-key } } }
{{- if $values.database }}
- { name: PGPASSWORD, valueFrom: { secretKeyRef: { name: {{ $values.secret | quote }}, key: database-password } } }
{{- end }}
{{- end }}
{{- end }}

{{- /* Seconds that a pod may take to end: the drain of a server, or a step of training and its checkpoint. */}}
{{- define "fp8serve.seconds" -}}
{{- ternary 600 (int .Values.drainSeconds) (eq .Values.run "job") }}
{{- end }}

{{- /* A pod's spec. fp8serve runs `arguments`; `answers` says that it listens. If `ranks` is set, torchrun starts a process
for each GPU, and several pods have numbers, `rank`, and the address of the first one, `leader`. */}}
{{- define "fp8serve.pod" -}}
{{- $values := .root.Values }}
{{- $isJob := eq $values.run "job" }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- if $isJob }}
restartPolicy: Never
{{- end }}
terminationGracePeriodSeconds: {{ add (include "fp8serve.seconds" .root) 15 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
containers:
  - name: {{ ternary "main" "fp8serve" (eq $values.run "kserve") }}
    image: {{ $values.image | quote }}
    {{- if not .ranks }}
    command: [fp8serve]
    {{- else if .leader }}
    command:
      - torchrun
      - --nnodes={{ $values.nodes }}
      - --node-rank={{ .rank }}
      - {{ printf "--master-addr=%s" .leader | quote }}
      - --master-port=29400
      - --nproc-per-node={{ max $values.gpus 1 }}
      - -m
      - fp8serve
    {{- else }}
    command: [torchrun, --standalone, --nproc-per-node={{ $values.gpus }}, -m, fp8serve]
    {{- end }}
    args:
      {{- .arguments | nindent 6 }}
    {{- if not $isJob }}
    lifecycle:
      preStop: { exec: { command: [sleep, "5"] } } # new requests go elsewhere before the drain refuses them
    {{- end }}
    {{- with include "fp8serve.env" . }}
    env:
      {{- . | nindent 6 }}
    {{- end }}
    {{- if .answers }}
    ports: [{ name: http, containerPort: 8000, protocol: TCP }]
    startupProbe: # until it listens; ranks first wait for the pods of all nodes
      httpGet: { path: /health/live, port: 8000, scheme: HTTP }
      periodSeconds: 5
      failureThreshold: 360
    readinessProbe:
      httpGet: { path: /health/ready, port: 8000, scheme: HTTP }
      periodSeconds: 5
    livenessProbe: # a busy server is alive; this fails only when its processes are gone or stuck
      httpGet: { path: /health/live, port: 8000, scheme: HTTP }
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 3
    {{- end }}
    resources:
      {{- $limits := ternary (dict "limits" (dict "nvidia.com/gpu" (toString $values.gpus))) dict (gt (int $values.gpus) 0) }}
      {{- mergeOverwrite $limits $values.resources | toYaml | nindent 6 }}
    securityContext:
      readOnlyRootFilesystem: true
      allowPrivilegeEscalation: false
      capabilities: { drop: [ALL] }
    volumeMounts:
      - { name: data, mountPath: /data }
      - { name: tmp, mountPath: /tmp }
      {{- if gt (int $values.gpus) 1 }}
      - { name: shm, mountPath: /dev/shm }
      {{- end }}
volumes:
  - { name: data, persistentVolumeClaim: { claimName: {{ $values.volume.claim | quote }} } }
  - { name: tmp, emptyDir: {} }
  {{- if gt (int $values.gpus) 1 }}
  - { name: shm, emptyDir: { medium: Memory } } # of NCCL, between the GPUs of a pod
  {{- end }}
{{- end }}

{{- /* The spec of `fp8serve.pod`, with the fields, containers and volumes that the values add. */}}
{{- define "fp8serve.spec" -}}
{{- $spec := include "fp8serve.pod" . | fromYaml }}
{{- with $spec.Error }}{{ fail (printf "A value makes a pod that is no YAML: %s." .) }}{{ end }}
{{- $pod := .root.Values.pod }}
{{- range $name := list "containers" "volumes" }}
{{- $_ := set $spec $name (concat (get $spec $name) (get $pod $name | default list)) }}
{{- end }}
{{- mergeOverwrite $spec (omit $pod "containers" "volumes") | toYaml }}
{{- end }}

{{- /* The pod template of `fp8serve.spec`, with its labels. */}}
{{- define "fp8serve.template" -}}
metadata:
  labels:
    {{- include "fp8serve.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  {{- include "fp8serve.spec" . | nindent 2 }}
{{- end }}
