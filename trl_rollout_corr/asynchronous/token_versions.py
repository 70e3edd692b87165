"""
Version of the weights that sampled each token, from a vLLM server that tells it (0.32 with `--enable-scale-out`).

The trainer labels the weights on the server at each push, before requests go on ([`LabellingTransfer`]). The rollout worker
asks the endpoint whose answers have the label of every token ([`VersionedLoop`]), and its samples carry the labels to
[`~trl_rollout_corr.asynchronous.samples.Carrier`].
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import repeat
from typing import Any

import numpy as np
import requests

from .trl_parts import RolloutLoop, RolloutSample


_COMPLETIONS, _GENERATE = "/v1/completions", "/inference/v1/generate"
_NO_SAMPLING = ("model", "prompt", "return_token_ids")  # fields of a completion that are no sampling parameters
_UNKNOWN = -1  # version of a token that is not sampled, or without a label


def ask_for_versions(trainer: Any) -> None:
    """
    Ask the server of a trainer for the version of each token, from its latest weights on, if it tells versions. An adapter,
    which has no weight transfer, finishes the completions that it began.
    """
    worker, transfer = trainer.rollout_worker, trainer.weight_transfer
    if transfer is None or getattr(worker, "_loop_cls", None) is not RolloutLoop:
        return
    url = trainer.vllm_client.server_url
    if _tells_versions(url):
        _label(url, trainer.model_version)
        trainer.weight_transfer = LabellingTransfer(transfer, trainer)
        worker._loop_cls = VersionedLoop


def _tells_versions(url: str) -> bool:
    """True if the server at an address tells the version of the weights of each token."""
    request: Any = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    response = requests.post(f"{url}{_GENERATE}", json=request, timeout=300)
    return response.ok and response.json()["choices"][0].get("weight_versions") is not None


def _label(url: str, version: int) -> None:
    """Label the weights of the server: tokens sampled from now on are of this version."""
    response = requests.post(f"{url}/update_weight_version", json={"new_version": str(version)}, timeout=300)
    if not response.ok:
        raise RuntimeError(
            f"The vLLM server at {url} refused version {version} as the label of its weights: {response.text}"
        )


class LabellingTransfer:
    """A weight transfer that labels the weights on the server before requests go on, with the version after `trainer`'s."""

    def __init__(self, transfer: Any, trainer: Any) -> None:
        self._transfer, self._trainer = transfer, trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    def resume(self) -> None:
        """Label the weights, and resume requests."""
        _label(self._trainer.vllm_client.server_url, self._trainer.model_version + 1)
        self._transfer.resume()


# In the process of the rollout worker ---------------------------------------------------------------------------------


class _Sampled(float):
    """Log-probability of a token, with the version of the weights that sampled it. Lists of TRL carry both."""

    version: int

    @classmethod
    def by(cls, version: int, logp: float) -> "_Sampled":
        sampled = cls(logp)
        sampled.version = version
        return sampled


@dataclass(slots=True)
class VersionedSample(RolloutSample):
    """A sample with the version of the weights that sampled each token, `(L,)`; -1 where it is not known."""

    versions: np.ndarray | None = None


class VersionedLoop(RolloutLoop):  # type: ignore[misc, valid-type]
    """TRL's loop of the rollout worker, with samples that know the version of the weights of each token."""

    async def _post(self, path: str, payload: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        if path != _COMPLETIONS:
            return dict(await super()._post(path, payload, *args, **kwargs))
        return _as_completion(await super()._post(_GENERATE, _as_generation(payload), *args, **kwargs))

    async def _score_group(self, group: Any) -> list[RolloutSample]:
        samples = await super()._score_group(group)
        rows = [row for of_one in group.completions_sequences for row in of_one]
        return [_versioned(sample, row.old_log_probs) for sample, row in zip(samples, rows, strict=True)]


def _versioned(sample: RolloutSample, logps: list[float]) -> VersionedSample:
    versions = np.array([getattr(logp, "version", _UNKNOWN) for logp in logps])
    return VersionedSample(**{x.name: getattr(sample, x.name) for x in fields(sample)}, versions=versions)


def _as_generation(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The request for `/inference/v1/generate` that asks for the same as one for `/v1/completions`."""
    of_request = {"model": payload["model"], "token_ids": payload["prompt"]}
    return {**of_request, "sampling_params": {k: v for k, v in payload.items() if k not in _NO_SAMPLING}}


def _as_completion(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer of `/inference/v1/generate` as one of `/v1/completions`, whose log-probabilities know their versions."""
    choices = []
    for choice in answer["choices"]:
        pairs = zip(choice["logprobs"]["content"], _versions(choice), strict=True)
        logps = [_Sampled.by(version, math.nan if (x := token["logprob"]) is None else x) for token, version in pairs]
        choices.append({**choice, "logprobs": {"token_logprobs": logps}})
    return {**answer, "choices": choices}


def _versions(choice: Mapping[str, Any]) -> Iterator[int]:
    """Version of each token of a completion."""
    for span in choice["weight_versions"] or [{"version": "", "start": 0, "end": len(choice["token_ids"])}]:
        version = int(span["version"]) if span["version"].isdecimal() else _UNKNOWN
        yield from repeat(version, span["end"] - span["start"])
