"""
Asynchronous GRPO with rollout correction, on questions whose answer is a number: vLLM's server samples while the trainer
learns.

    CUDA_VISIBLE_DEVICES=1 accelerate launch --config_file recipes/accelerate/single_gpu.yaml \\
        examples/async_grpo.py --config recipes/async_grpo/auto.yaml --server_devices 0

With `--server_devices` the server is started here, on these GPUs, and stopped in the end. Without, it is one that runs
already, at `--vllm_server_base_url`. Any recipe of recipes/async_grpo, any chat model and dataset: options on the command
line override the recipe. Without `--dataset_name` the questions are GSM8K's.
"""

import shlex
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from async_on_cpu import DiskWeightTransfer, on_a_cpu
from run import load_questions, load_tokenizer, parse, right_answer, save
from serving import vllm_server
from trl import ModelConfig, ScriptArguments, get_peft_config

from trl_rollout_corr import (
    RolloutCorrectedAsyncGRPOConfig,
    RolloutCorrectedAsyncGRPOTrainer,
)


@dataclass
class ModelArguments(ModelConfig):
    """Those of TRL, without the type of the weights, which the configuration of this trainer has as well."""

    dtype: ClassVar[str] = "float32"


@dataclass
class ServerArguments:
    """
    Arguments of this example.

    Args:
        server_devices (`str`, *optional*):
            Start a vLLM server on these GPUs (`"0,1"`), or on the `"cpu"`. By default it is there already.
        server_options (`str`, *optional*, defaults to `""`):
            Further options of its command line.
        weights_folder (`str`, *optional*):
            Folder through which weights go to the server, where NCCL cannot carry them. An adapter goes through files anyway.
    """

    server_devices: str | None = field(
        default=None,
        metadata={"help": "Start a vLLM server on these GPUs (0,1), or on the cpu; default: it is there."},
    )
    server_options: str = field(default="", metadata={"help": "Further options of its command line."})
    weights_folder: str | None = field(
        default=None, metadata={"help": "Folder through which weights go to it, where NCCL cannot carry them."}
    )


def server(
    args: RolloutCorrectedAsyncGRPOConfig, model_args: ModelConfig, server_args: ServerArguments
) -> AbstractContextManager:
    """A server that takes weights as the trainer sends them; on the main process, if it is to be started here."""
    if server_args.server_devices is None or args.process_index > 0:
        return nullcontext()
    if model_args.use_peft:  # room for every version that a sample may be from, and for the next
        transfer = ["--enable-lora", "--max-lora-rank", str(max(model_args.lora_r, 8))]
        transfer += ["--max-loras", str(args.max_staleness + 2)]
    else:
        transfer = [] if server_args.weights_folder else ["--weight-transfer-config", '{"backend":"nccl"}']
    on_a_cpu = server_args.server_devices == "cpu"
    return vllm_server(
        model_args.model_name_or_path,
        Path(args.output_dir) / "server.log",
        [*transfer, *shlex.split(server_args.server_options)],
        {} if on_a_cpu else {"CUDA_VISIBLE_DEVICES": server_args.server_devices},
        port=urlsplit(args.vllm_server_base_url).port,
    )


def main(arguments: list[str] | None = None):
    classes = (ScriptArguments, RolloutCorrectedAsyncGRPOConfig, ModelArguments, ServerArguments)
    script_args, args, model_args, server_args = parse(classes, __doc__, arguments)
    args.model_init_kwargs.pop("attn_implementation")  # rows are packed, with an attention that goes with that
    tokenizer = load_tokenizer(model_args, args.trust_remote_code)
    train_dataset = load_questions(script_args, script_args.dataset_train_split, tokenizer)
    if args.use_cpu and server_args.weights_folder is None and not model_args.use_peft:
        raise ValueError(
            "`weights_folder` is None, so weights go through NCCL, which needs GPUs. Set `--weights_folder`, or train an "
            "adapter with `--use_peft true`."
        )
    transfer = None
    if server_args.weights_folder is not None:
        transfer = DiskWeightTransfer(args.vllm_server_base_url, server_args.weights_folder)
    with server(args, model_args, server_args), on_a_cpu() if args.use_cpu else nullcontext():
        trainer = RolloutCorrectedAsyncGRPOTrainer(
            model=model_args.model_name_or_path,
            reward_funcs=right_answer,
            args=args,
            train_dataset=train_dataset,
            processing_class=tokenizer,
            peft_config=get_peft_config(model_args),
            weight_transfer=transfer,
        )
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    return save(trainer)


if __name__ == "__main__":
    main()
