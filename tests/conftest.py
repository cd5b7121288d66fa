"""The environment of every test process and of the actor processes below it; set before anything imports torch or monarch."""

from __future__ import annotations

import os

ENVIRONMENT = {
    # On few shared cores, waiting threads cost more than they bring.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # vLLM compiles one sampling function only; that costs seconds and saves nothing here.
    "TORCHDYNAMO_DISABLE": "1",
    # A dead process is seen, and a mesh is stopped, in about a second instead of ten.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",
    "HYPERACTOR_PROCESS_EXIT_TIMEOUT": "1s",
    "HYPERACTOR_CLEANUP_TIMEOUT": "500ms",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
