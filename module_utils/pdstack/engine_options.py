"""The long options of each engine and router, as their own parsers list them.

Extra arguments are checked against these names before anything is contacted. Written from the
wheels; tests/unit/plan/test_engine_flags.py compares them with the parsers.
"""

from __future__ import annotations

from typing import Dict, FrozenSet

_SGLANG_0_5_13_POST1 = """
abort-on-priority-when-disabled admin-api-key allow-auto-truncate api-key asr-max-buffer-seconds
asr-max-concurrent-sessions attention-backend attention-context-parallel-size attn-cp-size base-gpu-id
batch-notify-size bucket-e2e-request-latency bucket-inter-token-latency bucket-time-to-first-token chat-template
checkpoint-engine-wait-weights-before-ready chunked-prefill-size collect-tokens-histogram completion-template config
constrained-json-disable-any-whitespace constrained-json-whitespace-pattern context-length cpu-offload-gb
crash-dump-folder cuda-graph-bs cuda-graph-max-bs custom-sigquit-handler custom-weight-loader data-parallel-size
debug-cuda-graph debug-tensor-dump-inject debug-tensor-dump-input-file debug-tensor-dump-layers
debug-tensor-dump-output-folder decode-attention-backend decode-log-interval decrypted-config-file
decrypted-draft-config-file deepep-config deepep-dispatcher-output-dtype deepep-mode default-priority-value
delete-ckpt-after-loading detokenizer-worker-num device disable-attn-tp-gather disable-chunked-prefix-cache
disable-cuda-graph disable-cuda-graph-padding disable-custom-all-reduce disable-fast-image-processor
disable-flashinfer-autotune disable-flashinfer-cutlass-moe-fp4-allgather disable-hybrid-swa-memory
disable-outlines-disk-cache disable-overlap-schedule disable-piecewise-cuda-graph disable-priority-preemption
disable-radix-cache disable-shared-experts-fusion disable-tokenizer-batch-decode disaggregation-bootstrap-port
disaggregation-decode-enable-offload-kvcache disaggregation-decode-enable-radix-cache
disaggregation-decode-polling-interval disaggregation-ib-device disaggregation-mode disaggregation-transfer-backend
dist-init-addr dist-timeout dllm-algorithm dllm-algorithm-config download-dir dp-size dsa-decode-backend
dsa-prefill-backend dsa-prefill-cp-mode dsa-topk-backend dtype dynamic-batch-tokenizer-batch-size
dynamic-batch-tokenizer-batch-timeout elastic-ep-backend elastic-ep-rejoin enable-adaptive-dispatch-to-encoder
enable-aiter-allreduce-fusion enable-attn-tp-input-scattered enable-breakable-cuda-graph
enable-broadcast-mm-inputs-process enable-cache-report enable-cudagraph-gc enable-custom-logit-processor
enable-deepep-waterfill enable-deepseek-v4-fp4-indexer enable-deterministic-inference enable-dp-attention
enable-dp-attention-local-control-broadcast enable-dp-lm-head enable-draft-weights-cpu-backup
enable-dsa-prefill-context-parallel enable-dynamic-batch-tokenizer enable-dynamic-chunking
enable-elastic-expert-backup enable-eplb enable-expert-distribution-metrics enable-flashinfer-allreduce-fusion
enable-forward-pass-metrics enable-fp32-lm-head enable-fused-moe-sum-all-reduce enable-fused-qk-norm-rope
enable-hierarchical-cache enable-hisparse enable-http2 enable-layerwise-nvtx-marker enable-lmcache enable-lora
enable-lora-overlap-loading enable-memory-saver enable-metrics enable-metrics-for-all-schedulers enable-mfu-metrics
enable-mis enable-mixed-chunk enable-mm-global-cache enable-mscclpp enable-multi-layer-eagle enable-multimodal
enable-nccl-nvls enable-nsa-prefill-context-parallel enable-p2p-check enable-pdmux enable-piecewise-cuda-graph
enable-precise-embedding-interpolation enable-prefill-context-parallel enable-prefill-delayer enable-prefix-mm-cache
enable-priority-scheduling enable-profile-cuda-graph enable-quant-communications enable-request-time-stats-logging
enable-return-hidden-states enable-return-indexer-topk enable-return-routed-experts enable-single-batch-overlap
enable-ssl-refresh enable-streaming-session enable-strict-thinking enable-symm-mem enable-tokenizer-batch-encode
enable-torch-compile enable-torch-compile-debug-mode enable-torch-symm-mem enable-trace enable-two-batch-overlap
enable-weights-cpu-backup encoder-bootstrap-port encoder-only encoder-register-urls encoder-transfer-backend
encoder-urls enforce-disable-flashinfer-allreduce-fusion enforce-piecewise-cuda-graph enforce-shared-experts-fusion
engine-info-bootstrap-port ep ep-dispatch-algorithm ep-num-redundant-experts ep-size eplb-algorithm
eplb-min-rebalancing-utilization-threshold eplb-rebalance-layers-per-chunk eplb-rebalance-num-iterations
expert-distribution-recorder-buffer-size expert-distribution-recorder-mode expert-parallel-size
experts-shared-outer-loras export-metrics-to-file export-metrics-to-file-dir extra-metric-labels fastapi-root-path
file-storage-path flashinfer-mla-disable-ragged flashinfer-mxfp4-moe-precision forward-hooks
forward-pass-metrics-ipc-name forward-pass-metrics-worker-id fp4-gemm-backend fp8-gemm-backend gc-threshold
gc-warning-threshold-secs generation-tokens-buckets gpu-id-step grammar-backend grpc-http-sidecar-port grpc-mode help
hf-chat-template-name hicache-io-backend hicache-mem-layout hicache-ratio hicache-size hicache-storage-backend
hicache-storage-backend-extra-config hicache-storage-prefetch-policy hicache-write-policy
hierarchical-sparse-attention-extra-config hisparse-config host hybrid-kvcache-ratio incremental-streaming-output
init-expert-location is-embedding json-model-override-args keep-mm-feature-on-device kt-cpuinfer
kt-max-deferred-experts-per-token kt-method kt-num-gpu-experts kt-threadpool-count kt-weight-path kv-cache-dtype
kv-canary kv-canary-real-data kv-canary-sweep-interval kv-events-config language-only limit-mm-data-per-request
linear-attn-backend linear-attn-decode-backend linear-attn-prefill-backend lmcache-config-file load-balance-method
load-format load-snapshot-publish-interval log-level log-level-http log-requests log-requests-format
log-requests-level log-requests-target lora-backend lora-drain-wait-threshold lora-eviction-policy lora-paths
lora-strict-loading lora-target-modules lora-use-virtual-experts mamba-backend mamba-full-memory-ratio
mamba-scheduler-strategy mamba-ssm-dtype mamba-track-interval max-loaded-loras max-lora-chunk-size max-lora-rank
max-loras-per-batch max-mamba-cache-size max-prefill-tokens max-queued-requests max-running-requests max-total-tokens
mem-fraction-static mm-attention-backend mm-enable-dp-encoder mm-process-config model model-checksum
model-config-parser model-impl model-loader-extra-config model-path modelexpress-config
modelopt-checkpoint-restore-path modelopt-checkpoint-save-path modelopt-export-path modelopt-quant moe-a2a-backend
moe-data-parallel-size moe-dense-tp-size moe-dp-size moe-runner-backend mooncake-ib-device msprobe-dump-config
nccl-init-addr nccl-port nnodes no-experts-shared-outer-loras no-lora-strict-loading node-rank nsa-decode-backend
nsa-prefill-backend nsa-prefill-cp-mode num-continuous-decode-steps num-reserved-decode-tokens numa-node
offload-group-size offload-mode offload-num-in-group offload-prefetch-step optimistic-prefill-retries
otlp-traces-endpoint page-size pdmux-config-path piecewise-cuda-graph-compiler piecewise-cuda-graph-max-tokens
piecewise-cuda-graph-tokens pipeline-parallel-size port pp-async-batch-depth pp-max-micro-batch-size pp-size
pre-warm-nccl preferred-sampling-params prefill-attention-backend prefill-cp-mode
prefill-delayer-forward-passes-buckets prefill-delayer-max-delay-ms prefill-delayer-max-delay-passes
prefill-delayer-queue-min-ratio prefill-delayer-token-usage-low-watermark prefill-delayer-wait-seconds-buckets
prefill-max-requests prefill-only-disable-kv-cache prefill-round-robin-balance
priority-scheduling-preemption-threshold prompt-tokens-buckets quantization quantization-param-path quantize-and-serve
radix-cache-backend radix-eviction-policy random-seed reasoning-parser remote-instance-weight-loader-backend
remote-instance-weight-loader-seed-instance-ip remote-instance-weight-loader-seed-instance-service-port
remote-instance-weight-loader-send-weights-group-ports remote-instance-weight-loader-start-seed-via-transfer-engine
revision rl-on-policy-target rl-quant-profile sampling-backend sampling-defaults schedule-conservativeness
schedule-low-priority-values-first schedule-policy scheduler-recv-interval served-model-name show-time-cost
skip-server-warmup skip-tokenizer-init sleep-on-idle sm-group-num soft-watchdog-timeout
speculative-accept-threshold-acc speculative-accept-threshold-single speculative-adaptive speculative-adaptive-config
speculative-algorithm speculative-attention-mode speculative-dflash-block-size speculative-dflash-draft-window-size
speculative-draft-attention-backend speculative-draft-load-format speculative-draft-model speculative-draft-model-path
speculative-draft-model-quantization speculative-draft-model-revision speculative-draft-window-size
speculative-eagle-topk speculative-moe-a2a-backend speculative-moe-runner-backend speculative-ngram-capacity
speculative-ngram-external-corpus-max-tokens speculative-ngram-external-corpus-path
speculative-ngram-external-sam-budget speculative-ngram-match-type speculative-ngram-max-bfs-breadth
speculative-ngram-max-trie-depth speculative-ngram-min-bfs-breadth speculative-num-draft-tokens speculative-num-steps
speculative-skip-dp-mlp-sync speculative-token-map ssl-ca-certs ssl-certfile ssl-keyfile ssl-keyfile-password
stream-interval stream-output stream-response-default-include-usage strip-thinking-cache swa-full-tokens-ratio
tbo-token-distribution-threshold tensor-parallel-size tokenizer-backend tokenizer-metrics-allowed-custom-labels
tokenizer-metrics-custom-labels-header tokenizer-mode tokenizer-path tokenizer-worker-num tool-call-parser tool-server
torch-compile-max-bs torchao-config tp-size trace-modules triton-attention-num-kv-splits
triton-attention-reduce-in-fp32 triton-attention-split-tile-size trust-remote-code use-ray
uvicorn-access-log-exclude-prefixes warmups watchdog-timeout weight-loader-disable-mmap
weight-loader-drop-cache-after-load weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads
weight-version
"""

_SGLANG_0_5_23 = """
abort-on-priority-when-disabled admin-api-key allow-auto-truncate allowed-media-domains api-key asr-max-buffer-seconds
asr-max-concurrent-sessions attention-backend attention-context-parallel-size attention-data-parallel-size
attn-cp-size attn-dp-size base-gpu-id batch-notify-size bf16-gemm-backend boundary-reduction
bucket-e2e-request-latency bucket-inter-token-latency bucket-time-to-first-token c128-page-size chat-template
checkpoint-engine-wait-weights-before-ready chunked-prefill-size completion-template config
constrained-json-disable-any-whitespace constrained-json-max-whitespace-cnt constrained-json-whitespace-pattern
context-bucket context-length cp-strategy cpu-offload-gb crash-dump-folder cuda-graph-backend-decode
cuda-graph-backend-prefill cuda-graph-bs-decode cuda-graph-bs-prefill cuda-graph-config cuda-graph-max-bs-decode
cuda-graph-max-bs-prefill cuda-graph-max-seq-len-prefill cuda-graph-prefill-max-context custom-weight-loader
data-parallel-size dcp-comm-backend dcp-replicate-q-proj dcp-size debug-cuda-graph debug-tensor-dump-input-file
debug-tensor-dump-layers debug-tensor-dump-output-folder decode-attention-backend decode-context-parallel-size
decode-log-interval decoupled-spec-bind-endpoint decoupled-spec-connect-endpoints decoupled-spec-rank
decoupled-spec-role decrypted-config-file decrypted-draft-config-file deepep-config deepep-dispatcher-output-dtype
deepep-mode deepep-v2-mode default-chat-template-kwargs default-priority-value delete-ckpt-after-loading
detokenizer-worker-num device disable-aiter-allreduce-fusion-in-decode disable-aiter-allreduce-fusion-in-prefill
disable-attn-tp-gather disable-chunked-prefix-cache disable-cuda-graph disable-cuda-graph-padding
disable-custom-all-reduce disable-decode-cuda-graph disable-fast-image-processor disable-flashinfer-autotune
disable-flashinfer-cutlass-moe-fp4-allgather disable-hybrid-swa-memory disable-outlines-disk-cache
disable-overlap-schedule disable-prefill-cuda-graph disable-priority-preemption disable-radix-cache
disable-shared-experts-fusion disable-tokenizer-batch-decode disaggregation-bootstrap-port
disaggregation-decode-allocation-policy disaggregation-decode-enable-offload-kvcache
disaggregation-decode-enable-radix-cache disaggregation-decode-extra-slots
disaggregation-decode-host-receive-threshold disaggregation-decode-polling-interval
disaggregation-decode-retraction-backup disaggregation-enable-kv-checksum disaggregation-ib-device disaggregation-mode
disaggregation-transfer-backend dist-init-addr dist-timeout dllm-algorithm dllm-algorithm-config dllm-fdfo
download-dir dp-size dsa-decode-backend dsa-paged-mqa-logits-backend dsa-prefill-backend dsa-topk-backend
dsa-triton-union dsv4-attn-backend dsv4-prefill-backend dtype dwdp-size dynamic-batch-tokenizer-batch-size
dynamic-batch-tokenizer-batch-timeout elastic-ep-backend elastic-ep-initial-size elastic-ep-join-mode
elastic-ep-join-rank-offset elastic-ep-scale-timeout enable-adaptive-dispatch-to-encoder enable-aiter-allreduce-fusion
enable-amd-monokernel enable-attn-tp-input-scattered enable-broadcast-mm-inputs-process enable-cache-report
enable-cp-decode-attn-tp enable-cudagraph-gc enable-custom-logit-processor enable-decoder-swa-bounded-replay
enable-deepseek-v4-fp4-indexer enable-dense-mlp-attn-tp enable-deterministic-inference enable-dp-attention
enable-dp-attention-local-control-broadcast enable-dp-lm-head enable-draft-weights-cpu-backup
enable-dsa-cache-layer-split enable-dsa-fused-indexer enable-dynamic-batch-tokenizer enable-dynamic-chunking
enable-elastic-expert-backup enable-encoder-swa-bounded-replay enable-eplb enable-flashinfer-allreduce-fusion
enable-flexkv enable-forward-pass-metrics enable-fp32-lm-head enable-fused-moe-sum-all-reduce
enable-fused-qk-norm-rope enable-hicache enable-hierarchical-cache enable-hisparse enable-http-worker-reuseport
enable-http2 enable-int8-mamba-checkpoint enable-kv-cache-sharding enable-layernorm-sp enable-layerwise-nvtx-marker
enable-lean-attention enable-linear-replayssm enable-linear-replayssm-spec enable-linker-mla-dedup enable-lmcache
enable-lora enable-lora-overlap-loading enable-mamba-cache-stochastic-rounding enable-megamoe-for-layernorm-sp
enable-memory-saver enable-metrics enable-metrics-for-all-schedulers enable-mfu-metrics enable-mis enable-mixed-chunk
enable-mm-global-cache enable-mscclpp enable-multi-layer-eagle enable-multimodal enable-nccl-nvls
enable-nvidia-megakernel enable-p2p-check enable-page-major-kv-layout enable-paged-experts enable-pd-role-switch
enable-pdmux enable-precise-embedding-interpolation enable-prefill-cp enable-prefill-delayer enable-prefix-mm-cache
enable-priority-scheduling enable-profile-cuda-graph enable-quant-communications enable-request-time-stats-logging
enable-response-store enable-return-aux-hidden-states enable-return-hidden-states enable-return-indexer-topk
enable-return-routed-experts enable-scattered-sconv enable-session-radix-cache enable-shared-experts-attn-tp
enable-single-batch-overlap enable-ssl-refresh enable-streaming-session enable-strict-thinking enable-symm-mem
enable-tf32-matmul enable-tokenizer-batch-encode enable-torch-compile enable-torch-compile-debug-mode
enable-torch-symm-mem enable-tp-lm-head-all-to-all enable-trace enable-two-batch-overlap
enable-unified-cache-external-linker enable-unified-memory enable-w4a4-mxfp4-megamoe enable-waterfill enable-watermark
enable-weights-cpu-backup encoder-bootstrap-port encoder-only encoder-register-urls encoder-transfer-backend
encoder-urls enforce-disable-flashinfer-allreduce-fusion enforce-shared-experts-fusion engine-info-bootstrap-port ep
ep-dispatch-algorithm ep-num-redundant-experts ep-size eplb-algorithm eplb-min-rebalancing-utilization-threshold
eplb-rebalance-layers-per-chunk eplb-rebalance-num-iterations expert-balancedness-report-mode
expert-distribution-recorder-buffer-size expert-distribution-recorder-mode expert-parallel-size
experts-shared-outer-loras export-metrics-to-file export-metrics-to-file-dir extra-metric-labels fastapi-root-path
file-storage-path flashinfer-a2a-dispatch-type flashinfer-allreduce-fusion-backend flashinfer-autotune-skip-ops
flashinfer-mla-disable-ragged flashinfer-mxfp4-moe-precision flexkv-config-file forward-hooks
forward-pass-metrics-ipc-name forward-pass-metrics-worker-id fp4-gemm-backend fp8-gemm-backend fuseep-mode
gated-launch-port gc-threshold gc-warning-threshold-secs generation-tokens-buckets gpu-id-step grammar-backend
grpc-http-sidecar-port grpc-mode grpc-port grpc-response-timeout-secs help hf-chat-template-name
hicache-host-memory-fraction hicache-host-memory-mode hicache-io-backend hicache-mem-layout hicache-ratio hicache-size
hicache-storage-backend hicache-storage-backend-extra-config hicache-storage-prefetch-policy
hicache-storage-prefetch-retry-max-attempts hicache-storage-prefetch-retry-poll-interval hicache-write-policy
hierarchical-sparse-attention-extra-config hisparse-config host http2-initial-connection-window-size
http2-max-concurrent-streams image-processor-backend incremental-streaming-output init-expert-location
int8-mamba-ckpt-size is-embedding json-model-override-args kt-cpuinfer kt-max-deferred-experts-per-token kt-method
kt-num-gpu-experts kt-threadpool-count kt-weight-path kv-cache-dtype kv-canary kv-canary-real-data
kv-canary-sweep-interval kv-events-config language-model-only language-only limit-mm-data-per-request
linear-attn-backend linear-attn-decode-backend linear-attn-prefill-backend linear-attn-verify-backend
linear-replayssm-cache-len lmcache-config-file load-balance-method load-format load-publish-endpoint
load-snapshot-publish-interval log-level log-level-http log-requests log-requests-format log-requests-level
log-requests-target lora-backend lora-drain-wait-threshold lora-eviction-policy lora-paths lora-strict-loading
lora-target-modules lora-use-virtual-experts mamba-backend mamba-cache-philox-rounds mamba-full-memory-ratio
mamba-max-states-per-path mamba-radix-cache-strategy mamba-ssm-dtype mamba-track-interval max-ep-size max-loaded-loras
max-lora-chunk-size max-lora-rank max-loras-per-batch max-mamba-cache-size max-prefill-tokens max-queued-requests
max-running-requests max-total-tokens media-url-max-file-size-mb mem-fraction-static min-free-slots-delay
mlx-enable-sampling mm-attention-backend mm-enable-dp-encoder mm-feature-transport mm-global-cache-backend
mm-io-worker-num mm-preprocess-cache-size-mb mm-process-config mm-processor-worker-num model model-checksum
model-config-parser model-impl model-loader-extra-config model-path modelexpress-config
modelopt-checkpoint-restore-path modelopt-checkpoint-save-path modelopt-export-path modelopt-quant moe-a2a-backend
moe-data-parallel-size moe-dense-tp-size moe-dp-size moe-runner-backend monokernel-backend mooncake-ib-device
msprobe-dump-config nccl-init-addr nccl-port nnodes no-dcp-replicate-q-proj no-dllm-fdfo
no-enable-decoder-swa-bounded-replay no-enable-dsa-fused-indexer no-enable-fused-qk-norm-rope no-enable-tf32-matmul
no-enable-tp-lm-head-all-to-all no-experts-shared-outer-loras no-lora-strict-loading no-mm-enable-dp-encoder
no-ple-offload-embedding no-speculative-enable-w4a4-mxfp4-megamoe node-rank num-continuous-decode-steps
num-reserved-decode-tokens numa-node offload-group-size offload-mode offload-num-in-group offload-prefetch-step
optimistic-prefill-attempts otlp-service-name otlp-traces-endpoint page-size paged-experts-num-resident
pdmux-config-path pipeline-parallel-size ple-offload-backend ple-offload-dir ple-offload-embedding port
pp-async-batch-depth pp-max-micro-batch-size pp-size pre-warm-nccl preferred-sampling-params prefill-attention-backend
prefill-decode-interval prefill-decode-interval-min-bs prefill-delayer-forward-passes-buckets
prefill-delayer-max-delay-ms prefill-delayer-max-delay-passes prefill-delayer-queue-min-ratio
prefill-delayer-token-usage-low-watermark prefill-delayer-wait-seconds-buckets prefill-kv-cache-dequant-dtype
prefill-max-requests prefill-only-disable-kv-cache priority-scheduling-preemption-threshold prompt-tokens-buckets
qsa-indexer-dtype quantization quantization-param-path quantize-and-serve radix-cache-backend radix-eviction-policy
radix-eviction-policy-config random-seed reasoning-parser remote-instance-weight-loader-backend
remote-instance-weight-loader-seed-instance-ip remote-instance-weight-loader-seed-instance-service-port
remote-instance-weight-loader-send-weights-group-ports remote-instance-weight-loader-start-seed-via-transfer-engine
retraction-policy return-aux-hidden-state-layer-ids return-hidden-states-mode return-input-ids return-output-ids
revision rl-on-policy-target rl-quant-profile sampling-backend sampling-defaults sampling-mask-max-tokens
schedule-conservativeness schedule-low-priority-values-first schedule-policy scheduler-recv-interval served-model-name
shared-experts-tp-size show-time-cost sidecar sidecar-args skip-server-warmup skip-tokenizer-init sleep-on-idle
sm-group-num smg-grpc-mode smg-http-sidecar-port soft-watchdog-timeout spec-trace-dir speculative-accept-threshold-acc
speculative-accept-threshold-single speculative-adaptive speculative-adaptive-config speculative-algorithm
speculative-attention-mode speculative-dflash-block-size speculative-domino-candidate-pool-size
speculative-draft-attention-backend speculative-draft-kv-cache-dtype speculative-draft-load-format
speculative-draft-model speculative-draft-model-path speculative-draft-model-quantization
speculative-draft-model-revision speculative-draft-sink-size speculative-draft-window-size
speculative-dsa-topk-backend speculative-dspark-align-verify-tokens-to-graph-tier speculative-dspark-block-size
speculative-dspark-confidence-sts-path speculative-dspark-sps-table-path speculative-eagle-topk
speculative-enable-w4a4-mxfp4-megamoe speculative-moe-a2a-backend speculative-moe-runner-backend
speculative-ngram-capacity speculative-ngram-external-corpus-max-tokens speculative-ngram-external-corpus-path
speculative-ngram-external-sam-budget speculative-ngram-match-type speculative-ngram-max-bfs-breadth
speculative-ngram-max-trie-depth speculative-ngram-min-bfs-breadth speculative-num-draft-tokens speculative-num-steps
speculative-token-map speculative-use-block-verification speculative-use-rejection-sampling ssl-ca-certs ssl-certfile
ssl-keyfile ssl-keyfile-password startup-weight-load-mode stream-interval stream-response-default-include-usage
strip-thinking-cache swa-full-tokens-ratio swa-prefix-tails tbo-token-distribution-threshold tensor-parallel-size
tokenizer-backend tokenizer-metrics-allowed-custom-labels tokenizer-metrics-custom-labels-header tokenizer-mode
tokenizer-path tokenizer-worker-num tool-call-parser tool-server torch-compile-max-bs tp-size trace-modules
triton-attention-num-kv-splits triton-attention-reduce-in-fp32 triton-attention-split-tile-size
trust-mm-content-hashes trust-remote-code trust-request-chat-template unified-cache-external-linker-backend
unified-cache-external-linker-config uno-lora-path use-ray uvicorn-access-log-exclude-prefixes warmups
watchdog-timeout watermark-config weight-cache-mode weight-cache-socket weight-cache-timeout
weight-loader-disable-mmap weight-loader-drop-cache-after-load weight-loader-prefetch-checkpoints
weight-loader-prefetch-num-threads weight-version
"""

_SGLANG_ROUTER_0_3_2 = """
api-key assignment-mode backend balance-abs-threshold balance-rel-threshold bucket-adjust-interval-secs ca-cert-paths
cache-threshold cb-failure-threshold cb-success-threshold cb-timeout-duration-secs cb-window-duration-secs
chat-template client-cert-path client-key-path control-plane-api-keys control-plane-audit-enabled cors-allowed-origins
decode decode-policy decode-selector disable-circuit-breaker disable-health-check disable-retries dp-aware enable-igw
enable-trace eviction-interval-secs health-check-endpoint health-check-interval-secs health-check-timeout-secs
health-failure-threshold health-success-threshold help history-backend host jwt-audience jwt-issuer jwt-jwks-uri
jwt-role-mapping log-dir log-level max-concurrent-requests max-idle-secs max-payload-size max-tree-size
mcp-config-path mini-lb model-path oracle-connect-descriptor oracle-password oracle-pool-max oracle-pool-min
oracle-pool-timeout-secs oracle-tns-alias oracle-username oracle-wallet-path otlp-traces-endpoint pd-disaggregation
policy port postgres-db-url postgres-pool-max prefill prefill-policy prefill-selector prometheus-duration-buckets
prometheus-host prometheus-port queue-size queue-timeout-secs rate-limit-tokens-per-second reasoning-parser
redis-pool-max redis-retention-days redis-url request-id-headers request-timeout-secs retry-backoff-multiplier
retry-initial-backoff-ms retry-jitter-factor retry-max-backoff-ms retry-max-retries selector service-discovery
service-discovery-namespace service-discovery-port shutdown-grace-period-secs tls-cert-path tls-key-path
tokenizer-cache-enable-l0 tokenizer-cache-enable-l1 tokenizer-cache-l0-max-entries tokenizer-cache-l1-max-memory
tokenizer-path tool-call-parser worker-startup-check-interval worker-startup-timeout-secs worker-urls
"""

_SMG_1_13_0 = """
api-key assignment-mode backend balance-abs-threshold balance-rel-threshold balance-token-usage-threshold block-size
bucket-adjust-interval-secs ca-cert-paths cache-boundaries cache-index cache-match-threshold cache-threshold
cache-ttl-secs cb-failure-threshold cb-success-threshold cb-timeout-duration-secs cb-window-duration-secs
chat-template client-cert-path client-key-path control-plane-api-keys control-plane-audit-enabled cors-allowed-origins
decode decode-policy decode-selector disable-circuit-breaker disable-health-check disable-load-monitoring
disable-retries disable-tokenizer-autoload disable-worker-overload-protection discovery-check-interval-secs
discovery-file discovery-provider dp-aware dp-minimum-tokens-scheduler enable-igw enable-mesh enable-rl enable-trace
enable-wasm encode encode-policy encode-selector epd-disaggregation eviction-interval-secs header-read-timeout-secs
health-check-endpoint health-check-interval-secs health-check-port health-check-timeout-secs health-failure-threshold
health-success-threshold help history-backend history-memory-max-items history-memory-max-responses
history-memory-retention-secs host idle-connection-timeout-secs jemalloc-prof-dir job-queue-capacity
job-queue-concurrency jwt-audience jwt-issuer jwt-jwks-uri jwt-role-mapping kv-connector-annotation
kv-engine-id-annotation kv-index least-load-default-throughput least-load-kv-pressure-weight
least-load-max-waiting-requests least-load-mean-prefill-tokens load-monitor-interval log-dir log-json log-level
log-mm-timing max-background-responses max-buffered-request-bytes max-concurrent-requests max-idle-secs
max-payload-size max-tree-size mcp-config-path mesh-advertise-host mesh-host mesh-peer-urls mesh-port mesh-server-name
mesh-tls-ca-cert mesh-tls-cert mesh-tls-key mm-allow-private-media-hosts mm-allowed-media-domains
mm-per-request-image-limit mm-pixel-cache-mb mm-pixel-rdma mm-processing model model-alias model-id-from model-path
multimodal-max-inflight-bytes multimodal-shm-min-bytes multimodal-tensor-transport no-remove-unhealthy-workers
no-worker-auto-recovery oracle-connect-descriptor oracle-external-auth oracle-password oracle-pool-max oracle-pool-min
oracle-pool-timeout-secs oracle-tns-alias oracle-username oracle-wallet-path otlp-traces-endpoint overlap-decay
overload-token-usage-threshold parser pd-admission-wait-secs pd-disaggregation policy port postgres-db-url
postgres-op-timeout-secs postgres-pool-max power-of-two-load-metric prefill prefill-max-inflight-requests-per-worker
prefill-policy prefill-queue-size prefill-queue-timeout-secs prefill-selector prefix-hash-balance-abs-threshold
prefix-hash-load-factor prefix-token-count priority-scheduler-config priority-scheduler-default-max-class
priority-scheduler-enabled priority-scheduler-tenant-metric-top-n prometheus-duration-buckets prometheus-host
prometheus-port queue-size queue-timeout-secs rate-limit-tokens-per-second rdma-listen-ip rdma-slot-ttl-s
reasoning-parser redis-op-timeout-secs redis-pool-max redis-retention-days redis-url remove-unhealthy-workers
request-id-headers request-timeout-secs retry-backoff-multiplier retry-initial-backoff-ms retry-jitter-factor
retry-max-backoff-ms retry-max-retries rl-control-timeout-secs rl-fanout-concurrency router-selector
routing-key-headers routing-key-override schema-config selection-accounting-ttl-ms selection-policy
selection-temperature selector service-discovery service-discovery-namespace service-discovery-port
shutdown-grace-period-secs spill-abs-threshold spill-rel-threshold sse-keepalive-secs sticky-key-idle-secs
sticky-sessions storage-context-headers storage-hook-wasm-path stream-body-stall-timeout-secs tenant-api-key
tenant-header-name tenant-rate-limit-config tenant-rate-limit-enabled tls-cert-path tls-key-path
tokenizer-cache-enable-l0 tokenizer-cache-enable-l1 tokenizer-cache-l0-max-entries tokenizer-cache-l0-max-memory
tokenizer-cache-l1-max-memory tokenizer-path tool-call-parser trust-tenant-header upstream-http2
upstream-pool-idle-timeout-secs worker-auto-recovery worker-overload-protection worker-overload-shed
worker-overload-token-usage worker-overload-waiting-requests worker-stale-secs worker-stall-secs
worker-startup-check-interval worker-startup-delay worker-startup-timeout-secs worker-urls worker-warmup-blocks
worker-warmup-divert-every worker-warmup-secs worker-warmup-share worker-warmup-thin-ratio worker-wedge-secs
zmq-engine-count
"""

# What 0.5.23 added; 0.5.22 had one option that it dropped.
_NEW_IN_0_5_23 = """
enable-amd-monokernel enable-hicache enable-http-worker-reuseport enable-megamoe-for-layernorm-sp
enable-nvidia-megakernel enable-paged-experts enable-return-aux-hidden-states monokernel-backend
no-enable-decoder-swa-bounded-replay no-enable-fused-qk-norm-rope no-enable-tf32-matmul no-mm-enable-dp-encoder
paged-experts-num-resident prefill-decode-interval-min-bs return-aux-hidden-state-layer-ids
unified-cache-external-linker-config
"""

ENGINES: Dict[str, FrozenSet[str]] = {
    "0.5.13.post1": frozenset(_SGLANG_0_5_13_POST1.split()),
    "0.5.22": frozenset(_SGLANG_0_5_23.split()) - frozenset(_NEW_IN_0_5_23.split()) | {"speculative-skip-dp-mlp-sync"},
    "0.5.23": frozenset(_SGLANG_0_5_23.split()),
}
ROUTERS: Dict[str, FrozenSet[str]] = {
    "sglang-router 0.3.2": frozenset(_SGLANG_ROUTER_0_3_2.split()),
    "smg 1.13.0": frozenset(_SMG_1_13_0.split()),
}
