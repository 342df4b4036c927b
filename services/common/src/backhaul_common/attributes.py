"""Names of span attributes and log fields. Values never hold prompts, completions, lookup keys or secrets.

What OpenTelemetry's semantic conventions name is called so (`gen_ai` as of the version that is pinned; `rpc` as the
pinned instrumentation of gRPC still has it), all else begins with `backhaul`. docs/tracing.md says what each is.
"""

RPC_SYSTEM = "rpc.system"
RPC_SERVICE = "rpc.service"
RPC_METHOD = "rpc.method"
RPC_GRPC_STATUS_CODE = "rpc.grpc.status_code"

DB_SYSTEM = "db.system.name"
ERROR_TYPE = "error.type"
HTTP_STATUS = "http.response.status_code"

GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_MODEL = "gen_ai.request.model"
GEN_AI_STREAM = "gen_ai.request.stream"
GEN_AI_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

ETCD_KEY_COUNT = "backhaul.etcd.key_count"
ETCD_REVISION = "backhaul.etcd.revision"

NODE_ID = "backhaul.node.id"
SOURCE_NODE_ID = "backhaul.source_node.id"
ENGINE_ID = "backhaul.engine.id"
SET_ID = "backhaul.block_set.id"
POINTER_COUNT = "backhaul.pointer.count"
ROUTE = "backhaul.route"
SOURCE = "backhaul.source"
RESULT = "backhaul.result"
ESTIMATE = "backhaul.estimate.first_chunk"
FALLBACK = "backhaul.fallback"
MISS_REASON = "backhaul.miss.reason"
PROMPT_TOKENS = "backhaul.tokens.prompt"
LOCAL_TOKENS = "backhaul.tokens.local"
READ_TOKENS = "backhaul.tokens.read"
