"""Where models and caches lie on a host. Apart from the plan's types, for whose sake a module would import them all."""

STATE_DIR = "/var/lib/pdstack"
MODELS_DIR = f"{STATE_DIR}/models"
JIT_DIR = f"{STATE_DIR}/jit"
