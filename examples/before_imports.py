"""Imported first by the examples: sets variables that libraries read at import, so that they print only what matters."""

import logging
import multiprocessing
import os
import sys
import warnings


# vLLM logs a hundred lines, and some more about missing features of a CPU before it has read this variable.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(logging.ERROR)
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM on a CPU says by it to which memory it is bound
warnings.filterwarnings("ignore", category=FutureWarning)  # addressed to those who write libraries

# Of vLLM on a CPU: a small key-value cache, and the engine in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

if os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None:  # once for a run
    print("Loading PyTorch, TRL and vLLM ...", file=sys.stderr, flush=True)
