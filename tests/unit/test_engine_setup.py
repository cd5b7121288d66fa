"""What of the engine can be checked without vLLM."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

from monarch_rl.engine_setup import _kv_bytes, engine_environment


def test_importing_the_engine_is_light() -> None:
    """Its environment must be set before torch is imported, by whoever imports it."""
    code = "import sys, monarch_rl.engine; sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_threads_are_limited_on_cpu_only() -> None:
    assert engine_environment(cpu=True)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in engine_environment(cpu=False)
    assert engine_environment(cpu=False)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_kv_memory_holds_one_full_sequence() -> None:
    """Qwen3-0.6B: 28 layers, 8 key-value heads of 128, two matrices, 4 bytes: 229,376 bytes per token."""
    qwen = SimpleNamespace(num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, hidden_size=1024)
    assert _kv_bytes(qwen, 4096, "float32") == 229_376 * (4096 + 64)
    assert _kv_bytes(qwen, 4096, "bfloat16") == 229_376 * (4096 + 64) // 2
