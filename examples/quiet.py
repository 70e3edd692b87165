"""Imported before all else by the examples: keeps libraries from talking about what a user of them need not know."""

import logging
import os
import warnings


# vLLM says a hundred lines about itself. Before it has read this variable, some more about what a CPU lacks.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning)  # addressed to those who write libraries
