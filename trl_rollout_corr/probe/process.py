"""
The part of `diagnose --probe` that has a model: a process with one trainer and one sampler, which begins to train as the run
would, and stops before the first step.

    python -m trl_rollout_corr.probe request.json

It leaves a dump of the sampled tokens, and one of each counter-experiment. `trl_rollout_corr/probe/command.py` starts it and
reads them.
"""

import dataclasses
import json
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, TrainerCallback
from trl import ScriptArguments, get_peft_config, get_quantization_config
from trl.import_utils import is_vllm_available

from ..dumps.rows import make_row, on_host
from ..dumps.writing import write_rows
from ..messages import warn
from ..trainers.batch import ROLLOUT_LOGPS
from ..trainers.first_step import score_alone
from ..trainers.run_metadata import settings_in_effect
from ..trainers.sampler import distorting, neutral
from ..trainers.script import ScriptParser, model_config, model_init_kwargs, one_line_errors
from .rescoring import rescorings


PROMPTS = (
    "What is the capital of France?",
    "Name three colors.",
    "Count from one to ten.",
    "Why is the sky blue?",
    "Write a sentence about rain.",
    "What is 12 times 7?",
    "Explain what a prime number is, in two sentences.",
    "Say hello.",
    "List five animals that can fly.",
    "Which is larger, 0.8 or 0.75?",
    "Tell me a short story about a dog that is lost.",
    "How do you boil an egg?",
    "Translate 'good morning' into Spanish.",
    "What comes after Tuesday?",
    "Give a reason to read books.",
    "If I have 3 apples and eat one, how many are left? Think step by step.",
)
# Those that an experiment takes away, in the configuration and in `generation_kwargs`
_SAMPLING = {
    "whole_distribution": ("top_p", "top_k", "min_p"),
    "no_penalty": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
}
_LENGTH = 128  # tokens of a completion, unless the run has shorter ones
_CONTEXT = 1024  # tokens that the engine has room for, if there is no recipe
_SERVE = (
    """VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' """
    "--logprobs-mode processed_logprobs"
)
_PATIENCE = 5  # seconds in which a server that is there answers


# The run that is probed ---------------------------------------------------------------------------------------------------


def read(request: Mapping[str, Any]) -> tuple[type, Any, Any, Any]:
    """
    What the run would be.

    Args:
        request (`Mapping[str, Any]`):
            `model`, `trainer` (`"grpo"` or `"rloo"`), `config` (a file or `None`) and `options` (a command line).

    Returns:
        `tuple`: the class of the trainer, and the configurations of trainer, model and script.

    Raises:
        `ValueError`: if it cannot be used.
    """
    from ..trainers import grpo, rloo

    trainer_class, config_class = {
        "grpo": (grpo.RolloutCorrectedGRPOTrainer, grpo.RolloutCorrectedGRPOConfig),
        "rloo": (rloo.RolloutCorrectedRLOOTrainer, rloo.RolloutCorrectedRLOOConfig),
    }[request["trainer"]]
    parser = ScriptParser((ScriptArguments, config_class, model_config(config_class)))
    line = [*request["options"], "--model_name_or_path", request["model"], "--output_dir", request["output"]]
    given = ["--config", request["config"]]
    if not request["config"]:
        known = parser.parse_known_args(line)[0]
        source = {"revision": known.model_revision, "trust_remote_code": known.trust_remote_code}
        given = _without_recipe(_load(AutoConfig, request["model"], **source))
    script_args, args, model_args = parser.parse_args_and_config([*given, *line])
    if not args.use_vllm:
        raise ValueError("`use_vllm` is False, so that there is no sampler to probe. Set it to true.")
    if not is_vllm_available():
        raise ValueError("vLLM is not installed, which samples: pip install 'trl-rollout-corr[vllm]'.")
    args.model_init_kwargs = model_init_kwargs(args, model_args)
    return trainer_class, args, model_args, script_args


def _without_recipe(config: Any) -> list[str]:
    """TRL's defaults for a model, with a colocated engine; and what it takes where there is no accelerator."""
    length = min(getattr(config.get_text_config(), "max_position_embeddings", None) or _CONTEXT, _CONTEXT)
    options = ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_max_model_length", str(length)]
    return [*options, *([] if torch.accelerator.is_available() else ["--use_cpu", "true", "--bf16", "false"])]


def _load(kind: Any, model: str, **kwargs: Any) -> Any:
    """A configuration or a tokenizer of a model. Code of the model that is not trusted is an error, and no question."""
    try:
        return kind.from_pretrained(model, **kwargs)
    except OSError as error:
        raise ValueError(
            f"{model!r} is neither a folder with a model nor one that the Hub has, or gives to you."
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"`trust_remote_code` is False, and {model!r} has code of its own, which would run here. Read that code, and set "
            "`trust_remote_code: true` in the recipe, or pass `--trust_remote_code true`."
        ) from error


def shortened(args: Any, completions: int, engine: Mapping[str, Any]) -> Any:
    """
    The run, as far as its first batch goes.

    Args:
        args ([`RolloutCorrectedGRPOConfig`]):
            Configuration of the run.
        completions (`int`):
            How many completions the first batch should have, at least.
        engine (`Mapping[str, Any]`):
            Arguments of the engine besides those of the run.

    Returns:
        [`RolloutCorrectedGRPOConfig`].
    """
    size = min(args.per_device_train_batch_size, completions)
    batches = -(-completions // size)
    batches += batches * size % 2  # two completions for each prompt
    wanted = {
        "per_device_train_batch_size": size,
        "generation_batch_size": None,
        "steps_per_generation": batches,
        "gradient_accumulation_steps": batches,
        "num_generations": 2,
        "num_iterations": 1,
        "max_completion_length": min(args.max_completion_length or _LENGTH, _LENGTH),
        # neither learned nor kept, and no part of the gap
        "max_steps": 1,
        "beta": 0.0,
        "sync_ref_model": False,
        "reward_weights": None,
        "mask_truncated_completions": False,
        "log_completions": False,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "resume_from_checkpoint": None,
        "dataloader_num_workers": 0,
        "rollout_dump_dir": None,
        "rollout_diagnose": False,
    }
    if args.vllm_mode == "colocate":
        # compiling for a CPU would take longer than everything else
        eager = {"enforce_eager": True} if _on_cpu(args) else {}
        wanted["rollout_engine_kwargs"] = _merged({**eager, **(args.rollout_engine_kwargs or {})}, engine) or None
    known = {field.name for field in dataclasses.fields(args) if field.init}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the run, and said when it was read
        return dataclasses.replace(args, **{name: value for name, value in wanted.items() if name in known})


def _merged(kwargs: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: {**kwargs[name], **more[name]} for name in more if isinstance(kwargs.get(name), dict)}
    return {**kwargs, **more, **both}


def _on_cpu(args: Any) -> bool:
    return args.device.type == "cpu"


def prompts_of(file: str | None, script_args: Any, tokenizer: Any, n: int) -> list[Any]:
    """
    Prompts: those of a file, one a line, or of the recipe's dataset, or some plain ones.

    Args:
        file (`str`, *optional*):
            A text file.
        script_args ([`~trl.ScriptArguments`]):
            May name a dataset, with a column `prompt` or `question`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            If it has a chat template, texts become messages.
        n (`int`):
            How many.

    Returns:
        `list`: as TRL takes them, over and over again if there are less.

    Raises:
        `ValueError`: if there are none.
    """
    found: list[Any] = list(PROMPTS)
    if file is not None:
        found = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
        if not found:
            raise ValueError(f"{file}: has no prompts; write one in each line.")
    elif script_args.dataset_name is not None:
        found = _of_dataset(script_args, n)
    chats = tokenizer.chat_template is not None
    found = [[{"role": "user", "content": x}] if chats and isinstance(x, str) else x for x in found]
    return list(islice(cycle(found), n))


def _of_dataset(script_args: Any, n: int) -> list[Any]:
    from datasets import load_dataset

    name, split = script_args.dataset_name, script_args.dataset_train_split
    dataset = load_dataset(name, name=script_args.dataset_config, split=split, streaming=script_args.dataset_streaming)
    rows = list(dataset.take(n))
    column = next((column for column in ("prompt", "question") if rows and column in rows[0]), None)
    if column is None:
        raise ValueError(
            f"{name}: has {'columns ' + ', '.join(rows[0]) if rows else 'no rows'}; prompts are in one that is called "
            "`prompt` or `question`."
        )
    return [row[column] for row in rows]


def check_server(args: Any):
    """Refuse at once a server that is not there, for which TRL would wait for minutes."""
    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_PATIENCE):
            return
    except (OSError, ValueError) as error:
        raise ValueError(f"no vLLM server answers at {url} ({error}). Start one with: {_SERVE}") from error


# The trainer --------------------------------------------------------------------------------------------------------------


class _Prepared(Exception):
    """All is as it is when training begins."""


class _StopBeforeTraining(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        raise _Prepared


@contextmanager
def _attached_without_weights(args: Any) -> Iterator[bool]:
    """
    Whether weights can be pushed. They go to a server through NCCL, which takes a GPU; without one the server keeps its own,
    and TRL would refuse.
    """
    if args.vllm_mode != "server" or not _on_cpu(args):
        yield True
        return
    from trl.generation.vllm_client import VLLMClient

    warn("Weights are pushed to a server by a GPU, and there is none: it samples with those that it was started with.")
    before = VLLMClient.init_communicator
    VLLMClient.init_communicator = lambda *args, **kwargs: None
    try:
        yield False
    finally:
        VLLMClient.init_communicator = before


class Probe:
    """
    A trainer before its first step, whose batches are sampled and scored as often as one likes.

    Args:
        trainer ([`RolloutCorrectedGRPOTrainer`] or [`RolloutCorrectedRLOOTrainer`]):
            The trainer, with a sampler. It begins to train here.
        pushes (`bool`, *optional*, defaults to `True`):
            Whether its weights are pushed to the sampler, as at the first step of a run.
        run ([`RolloutCorrectionConfig`], *optional*):
            Configuration of the run that is probed. That of the trainer by default.

    Attributes:
        about (`dict[str, str]`):
            How both compute.
    """

    def __init__(self, trainer: Any, pushes: bool = True, run: Any = None):
        self.trainer, self.pushes, self.run = trainer, pushes, run or trainer.args
        trainer.add_callback(_StopBeforeTraining())
        with suppress(_Prepared):
            trainer.train()
        trainer.model_wrapped.train()
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        self.inputs = next(iter(trainer.get_train_dataloader()))
        head = getattr(getattr(trainer._engine_config, "model_config", None), "head_dtype", None)
        self.about = {
            "trainer": type(trainer).__name__,
            **trainer._facts(),
            **({} if head is None else {"sampler_head_dtype": str(head).removeprefix("torch.")}),
        }

    def sample(self, *, push: bool = True) -> list[dict[str, Any]]:
        """Sample the first batch, with the weights of the trainer or with those that the sampler has. Batches of TRL's."""
        trainer = self.trainer
        trainer._last_loaded_step = -1 if push and self.pushes else trainer.state.global_step
        trainer._buffered_inputs = None
        trainer._prepare_inputs(self.inputs)
        return trainer._buffered_inputs

    def score(self, batches: list[dict[str, Any]]) -> list[torch.Tensor]:
        """Score batches as the loss does, `(B, T)` each."""
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            return [self._forward(batch) for batch in batches]

    def _forward(self, batch: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        n = batch["completion_ids"].shape[1]
        logps = self.trainer._get_per_token_logps_and_entropies(self.trainer.model_wrapped, ids, attention, n)[0]
        return logps.float()

    def score_alone(self, batches: list[dict[str, Any]]) -> list[torch.Tensor]:
        """The same one by one, and without padding."""
        forward = self.trainer._get_per_token_logps_and_entropies
        with self.trainer.compute_loss_context_manager():
            return [
                score_alone(forward, self.trainer.model_wrapped, batch, len(batch["prompt_ids"])) for batch in batches
            ]

    def write(
        self,
        folder: Path,
        batches: list[dict[str, Any]],
        logps: list[torch.Tensor],
        again: list[torch.Tensor] | None = None,
    ):
        """Write a dump of batches that were scored."""
        rows = [
            row
            for i, batch in enumerate(batches)
            for row in self._rows(batch, logps[i], None if again is None else again[i])
        ]
        write_rows(folder, 1, 0, rows, settings_in_effect(self.run), self.about)

    def _rows(self, batch: dict[str, Any], logps: torch.Tensor, again: torch.Tensor | None) -> list[dict[str, Any]]:
        mask = self.trainer._loss_mask(batch).bool()
        columns = {
            **{name: batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")},
            "mask": mask,
            "train_logps": logps,
            "rollout_logps": batch[ROLLOUT_LOGPS].float(),
            "weights": None,
            "keep": mask,
            "coefficients": mask.float(),
            "reward": torch.zeros(len(mask)),
            "advantage": torch.zeros(len(mask)),
            "staleness": torch.zeros(len(mask)),
            "again_logps": again,
        }
        return [make_row(sequence, step=1) for sequence in on_host(columns)]

    @contextmanager
    def sampling_without(self, names: tuple[str, ...]) -> Iterator[None]:
        """The sampler without settings that distort what it samples."""
        generation = self.trainer.vllm_generation
        fields: dict[str, Any] = {name: neutral(name) for name in names if hasattr(generation, name)}
        fields["generation_kwargs"] = {k: v for k, v in generation.generation_kwargs.items() if k not in names}
        before = {name: getattr(generation, name) for name in fields}
        try:
            for name, value in fields.items():
                setattr(generation, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(generation, name, value)

    def distorts(self, names: tuple[str, ...]) -> bool:
        """Whether any of these settings of the sampler does something."""
        generation = self.trainer.vllm_generation
        values = {name: getattr(generation, name, None) for name in names}
        values |= {name: value for name, value in generation.generation_kwargs.items() if name in names}
        return bool(distorting(values))


def run(probe: Probe, output: Path, *, experiments: bool = True) -> dict[str, str]:
    """
    Sample and score once as it is, and then with each change that needs no other engine.

    Args:
        probe ([`Probe`]):
            The trainer.
        output (`Path`):
            Folder for the dumps: `as_it_is`, and one for each experiment.
        experiments (`bool`, *optional*, defaults to `True`):
            Whether to run any.

    Returns:
        `dict[str, str]`: why experiments were left out, by name.
    """
    left_out: dict[str, str] = {}
    generation = probe.trainer.vllm_generation
    if experiments and probe.pushes and not getattr(generation, "enable_sleep_mode", False):
        batches = probe.sample(push=False)
        probe.write(output / "before_the_push", batches, probe.score(batches))
    batches = probe.sample()
    again = probe.score_alone(batches)
    probe.write(output / "as_it_is", batches, probe.score(batches), again)
    if not experiments:
        return left_out
    probe.write(output / "batch_of_one", batches, again)
    for name, change in rescorings(probe.trainer, probe.about["trainer_dtype"]).items():
        try:
            with change(probe.trainer):
                probe.write(output / name, batches, probe.score(batches))
        except torch.OutOfMemoryError:
            left_out[name] = "There is not enough memory for it."
    for name, settings in _SAMPLING.items():
        if probe.distorts(settings):
            with probe.sampling_without(settings):
                other = probe.sample()
                probe.write(output / name, other, probe.score(other))
    return left_out


def build(request: Mapping[str, Any]) -> Probe:
    """The trainer and the sampler of a request."""
    trainer_class, args, model_args, script_args = read(request)
    source = {"revision": model_args.model_revision, "trust_remote_code": args.trust_remote_code}
    _load(AutoConfig, request["model"], **source)  # a tokenizer may have no code where the model has
    tokenizer = _load(AutoTokenizer, request["model"], **source, padding_side="left")
    run, args = args, shortened(args, request["completions"], request["engine"])
    if args.vllm_mode == "server":
        check_server(args)
    from datasets import Dataset

    n = args.per_device_train_batch_size * args.steps_per_generation // args.num_generations
    prompts = prompts_of(request["prompts"], script_args, tokenizer, n)
    with _attached_without_weights(args) as pushes:
        trainer = trainer_class(
            model=request["model"],
            reward_funcs=_no_reward,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    return Probe(trainer, pushes, run)


def _no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def main(path: str):
    """Do what a request says, and leave dumps and `facts.json` in its folder."""
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    output = Path(request["output"])
    with one_line_errors():
        probe = build(request)
        left_out = run(probe, output, experiments=request["experiments"])
    facts = {
        "about": probe.about,
        "left_out": left_out,
        "mode": probe.trainer.vllm_mode,
        "pushes": probe.pushes,
    }
    (output / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
