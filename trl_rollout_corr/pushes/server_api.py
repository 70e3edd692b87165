"""
A vLLM server seen through its own API: its configuration, weights, log-probabilities of a text, and adapters.

A server that was started with our extension of its worker returns fingerprints of its weights, as a colocated vLLM
does ([`read_server`]). Any other server can score a text ([`score_on_server`]) and list its adapters
([`AdapterCheck`]).
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
from packaging.version import Version

from ..messages import notify
from ..trainers.completions import as_logps
from .weight_check import SEE_ARRIVAL


PATTERNS = "0.32"  # release of vLLM that reads `rank_pattern` and `alpha_pattern` of an adapter
EXTENSION = "trl_rollout_corr.worker.PackingWorker"


def has_extension(config: Any) -> bool:
    """True if the configuration that a server returns names our extension of its worker."""
    parallel = config.get("parallel_config", {}) if isinstance(config, Mapping) else {}
    return bool(parallel.get("worker_extension_cls") == EXTENSION)


def read_server(url: str, names: list[str]) -> dict[str, Any]:
    """Weights that the workers of a server hold: [`~trl_rollout_corr.pushes.fingerprints.read_weights`]."""
    request: Any = {"method": "read_weights", "args": [names]}
    response = requests.post(f"{url}/collective_rpc", json=request, timeout=300)
    response.raise_for_status()
    workers = response.json()["results"]
    held = {
        name: [list(form) for form in zip(*(worker["held"].get(name, forms) for worker in workers), strict=True)]
        for name, forms in workers[0]["held"].items()
    }
    return {**workers[0], "held": held}


def replicas_of(config: Any) -> int:
    """
    Number of engines among which a server, with this configuration, shares requests out (`--data-parallel-size`).
    """
    parallel = config.get("parallel_config", {}) if isinstance(config, Mapping) else {}
    elsewhere = any(parallel.get(f"data_parallel_{way}_lb") for way in ("external", "hybrid"))
    return int(parallel.get("data_parallel_size_local" if elsewhere else "data_parallel_size") or 1)


def score_on_server(url: str, model: str, text: list[int], replica: int | None = None) -> list[float]:
    """
    Log-probability of each token but the first of a text, from a server without options of sampling; minus infinity
    where the server writes -9999. A replica of its own choice answers, unless one is given.
    """
    request: Any = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    request["cache_salt"] = "scored once more"  # keeps later requests from reading these prompts
    headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
    response = requests.post(f"{url}/v1/completions", json=request, headers=headers, timeout=300)
    response.raise_for_status()
    (choice,) = response.json()["choices"]
    places = zip(text[1:], choice["prompt_logprobs"][1:], strict=True)
    logps: list[float] = as_logps([place[str(token)]["logprob"] for token, place in places]).tolist()
    return logps


def adapters_of(url: str) -> set[str]:
    """Names of the models and adapters of a server."""
    response = requests.get(f"{url}/v1/models", timeout=60)
    response.raise_for_status()
    return {model["id"] for model in response.json()["data"]}


class AdapterCheck:
    """
    Check of each adapter that is pushed to a server through files.

    It hashes the trained parameters and the pushed files. If the parameters changed since the previous push and the
    files did not, the run pushes something else than the trained adapter, and [`AdapterCheck.pushed`] raises an error.
    If the server then lacks the name of the adapter, it warns.
    """

    def __init__(self) -> None:
        self._before: tuple[int, str] | None = None
        self._warned = False

    def pushed(self, url: str, name: str, folder: Path, trained: int, step: int) -> None:
        """
        Check a push of the files in `folder` to the server at `url`, after optimizer step `step`, on the main process.
        `trained` is the fingerprint of the trained parameters.
        """
        pushed, before = _hash_of(folder), self._before
        if pushed is None:
            return
        self._before = trained, pushed
        if before is not None and before[1] == pushed and before[0] != trained:
            raise RuntimeError(
                f"The adapter that was pushed after optimizer step {step} is the same, to the last bit, as the one "
                "pushed before, although the trained parameters have changed: the sampler does not get what the "
                "trainer learns. Check whether another adapter is active, or whether parameters outside the adapter "
                f"are trained. {SEE_ARRIVAL}"
            )
        self._ask(url, name, step)

    def _ask(self, url: str, name: str, step: int) -> None:
        try:
            there = adapters_of(url)
        except (requests.RequestException, LookupError, ValueError) as error:
            if not self._warned:
                self._warned = True
                notify(
                    f"From here on, nothing tells whether the vLLM server at {url} has each adapter that is pushed: "
                    f"its list of adapters cannot be read ({type(error).__name__}: {error}). {SEE_ARRIVAL}"
                )
            return
        if name not in there and not self._warned:
            self._warned = True
            notify(
                f"Perhaps several servers share one address, or a server was restarted: after optimizer step {step}, "
                f"the vLLM server at {url} accepted the adapter `{name}`, but does not list it in `/v1/models`. It "
                f"has {', '.join(sorted(there)) or 'none'}. {SEE_ARRIVAL}"
            )


def served_adapter(model: Any) -> Any:
    """The `LoraConfig` of the trained adapter of a PEFT model."""
    return model.peft_config[model.active_adapters[0]]


def check_served_adapter(url: str, model: Any) -> None:
    """Refuse a server that cannot load the adapter of a PEFT model."""
    check_patterns(url, served_adapter(model))


def check_patterns(url: str, adapter: Any) -> None:
    """
    Refuse an adapter with ranks or scales for single layers if the vLLM server at `url` would serve it with one scale.
    `adapter` is its `LoraConfig`.
    """
    patterns = {name: x for name in ("rank_pattern", "alpha_pattern") if (x := getattr(adapter, name, None))}
    if not patterns:
        return
    response = requests.get(f"{url}/version", timeout=60)
    known = response.json()["version"] if response.ok else None
    if known is not None and Version(Version(known).base_version) >= Version(PATTERNS):
        return
    listed = " and ".join(f"`{name}={x!r}`" for name, x in patterns.items())
    message = (
        f"The adapter has {listed}, and a vLLM before {PATTERNS} multiplies all layers of an adapter that it serves "
        "by `lora_alpha / r`, so that these layers get a wrong scale without a word. Install a newer vLLM on the "
        "server, remove the patterns, or start the server without `--enable-lora`: the adapter is then merged, which "
        "is right."
    )
    if known is None:
        notify(f"The server at {url} does not tell its version, so this may not concern it. {message}")
    else:
        raise ValueError(f"{message} The server has vLLM {known}.")


def _hash_of(folder: Path) -> str | None:
    """Hash of the weights in the folder of an adapter; `None` without any."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest() if files else None
