"""
Fingerprints of the weights that are sent to vLLM, and of the weights that vLLM holds. This runs in the process of the
engine, which may be a server.

vLLM fuses weights, and packs them for its CPU kernels. So the fingerprint of a tensor in vLLM covers all elements in
any order, and the fingerprint of a tensor that is sent covers a few columns: if these columns change, the whole tensor
must.
"""

from collections.abc import Iterable
from typing import Any

import torch


COLUMNS = 4  # of a matrix
READABLE = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
QUANTISED = dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8, torch.uint8), torch.int8)
_AS_BITS = READABLE | QUANTISED


def fingerprint(x: torch.Tensor) -> torch.Tensor:
    """
    Integer, `()`, that depends on each bit of a tensor. It stays on the device of the tensor, so nothing waits.

    A change of one element changes the sums of its row and of its column. The sums are hashed with their place.
    """
    matrix = x.detach().reshape(-1, x.shape[-1] if x.dim() > 1 else 1)
    bits = matrix.view(_AS_BITS[x.dtype])
    rows, columns = (_hash(bits.sum(dim, dtype=torch.int64)) for dim in (1, 0))
    return rows.sum() + 3 * columns.sum()


def _hash(sums: torch.Tensor) -> torch.Tensor:
    """Hash of each number and its place: the finaliser of SplitMix64, modulo 2^64."""
    x = sums + torch.arange(len(sums), device=sums.device) * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return x ^ (x >> 31)


def some_columns(x: torch.Tensor) -> torch.Tensor:
    """
    A few columns of a matrix or of a layer's experts, or a whole vector. NaN becomes 0, because it comes in many
    forms.
    """
    return (_some(x) if x.dim() > 1 else x).nan_to_num(nan=0.0)


def _some(x: torch.Tensor) -> torch.Tensor:
    return x[..., :: max(1, x.shape[-1] // COLUMNS)][..., :COLUMNS]


def packed_columns(layer: Any) -> torch.Tensor:
    """The same columns of a weight packed for a CPU kernel: the outputs of the layer for unit vectors."""
    weight = layer.weight
    width = (
        weight.shape[-1] if weight.numel() else getattr(layer, "input_size_per_partition", None) or layer.input_size
    )
    columns = _some(torch.arange(width))
    units = torch.zeros(len(columns), width, dtype=weight.dtype)
    units[torch.arange(len(columns)), columns] = 1
    with torch.no_grad():
        return torch.as_tensor(layer.cpu_linear(units, weight, None))


def read_weights(model: Any, names: Iterable[str], group: Any = None) -> dict[str, Any]:
    """
    Weights that a model of vLLM holds, and the tensors where it puts some weights of the trainer's checkpoint, given
    by `names`.

    `held` maps each tensor of the model to its fingerprints, one for each form in which a layer keeps it, summed over
    `group`, the ranks that share the model. `places` maps each weight to the tensors that hold it, where that is
    certain; `""` means the whole model. A tensor into which vLLM fuses several weights counts as one for each of them,
    such as `qkv_proj.weight[k_proj]`. `quantised` lists tensors of 8 or 4 bits, and `unreadable` the weights held in
    another form. All consist of lists and numbers, because a server must send them.
    """
    forms_of: dict[str, list[torch.Tensor]] = {}
    fused = getattr(model, "packed_modules_mapping", None) or {}
    of_memory: dict[Any, list[torch.Tensor]] = {}  # tied layers share the memory of their weights
    unreadable, quantised = set(), []
    for prefix, layer in model.named_modules():
        for parameter, x in layer.named_parameters(recurse=False):
            name = f"{prefix}.{parameter}".replace(".base_layer.", ".")
            packed = parameter == "weight" and x.dim() < 3 and hasattr(layer, "cpu_linear")
            # in a group each rank holds other columns
            columns = packed_columns(layer) if x.dtype in READABLE and packed and group is None else None
            rows = columns.T if columns is not None else None if packed else x
            if parts := _parts(layer, fused.get(name.split(".")[-2:][0], []), rows):
                forms_of |= {f"{name}[{part}]": [fingerprint(some)] for part, some in parts.items()}
                continue
            forms = of_memory.setdefault((x.data_ptr(), x.shape) if x.numel() else name, [])
            if x.dtype in QUANTISED:
                quantised.append(name)
            if x.dtype in _AS_BITS and x.numel() and not forms:
                forms.append(fingerprint(x))
            if columns is not None:
                forms.append(fingerprint(columns))
            forms_of[name] = forms
            if not forms:
                unreadable.add(name)
    held = _numbers({name: forms for name, forms in forms_of.items() if forms}, group)
    in_vllm = {name: _name_in_vllm(model, name) for name in names}
    parts_of: dict[str, list[str]] = {}
    for tensor in held:
        whole, bracket, _ = tensor.partition("[")
        if bracket:
            parts_of.setdefault(whole, []).append(tensor)
    places = {
        name: place for name, known in in_vllm.items() if (place := _place(known, name, held, parts_of, unreadable))
    }
    missing = [name for name, known in in_vllm.items() if known is not None and name not in places]
    return {"held": held, "places": places, "quantised": quantised, "unreadable": missing}


def _parts(layer: Any, names: list[str], rows: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """
    Rows of each weight that vLLM fuses into a tensor, by its name; empty if it is another tensor or unknown. The names
    stand in the order of the rows, by which vLLM slices its adapters, too.
    """
    sizes = getattr(layer, "output_partition_sizes", None) or []
    if rows is None or rows.dtype not in READABLE or not len(sizes) == len(names) > 1:
        return {}
    if not rows.dim() or len(rows) != sum(sizes):
        return {}
    return dict(zip(names, rows.split(sizes), strict=True))


def _numbers(fingerprints: dict[str, list[torch.Tensor]], group: Any) -> dict[str, list]:
    """Fingerprints as numbers, with one wait for the device."""
    if not fingerprints:
        return {}
    together = torch.stack([form for forms in fingerprints.values() for form in forms])
    if group is not None:
        torch.distributed.all_reduce(together, group=group)
    numbers = iter(together.tolist())
    return {name: [next(numbers) for _ in forms] for name, forms in fingerprints.items()}


def _name_in_vllm(model: Any, name: str) -> str | None:
    """Name of vLLM's tensor that a weight is fused into, by vLLM's own rules; `None` if it ignores the weight."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rule = getattr(mapper, "map_name", None) or getattr(mapper, "_map_name", None)
    if rule and (name := rule(name)) is None:
        return None
    path, _, parameter = name.rpartition(".")
    path, _, layer = path.rpartition(".")
    for fused, parts in (getattr(model, "packed_modules_mapping", None) or {}).items():
        if layer in parts:
            layer = fused
    return ".".join(part for part in (path, layer, parameter) if part)


def _place(
    name: str | None, sent: str, held: dict[str, list], parts_of: dict[str, list[str]], unreadable: set[str]
) -> list[str]:
    """
    Tensors that hold a weight, which vLLM calls `name`; the whole model (`""`) if unknown; none if unreadable. `sent`
    is its name in the checkpoint, which tells a part of a fused tensor, and `parts_of` has the parts of each.
    """
    if name is None or name in unreadable:
        return []
    if name in held:
        return [name]
    if parts := parts_of.get(name):
        own = f"{name}[{sent.split('.')[-2]}]"
        return [own] if own in parts else parts  # all of them for a checkpoint that fuses as well
    if ".experts." in name:  # vLLM keeps all experts of a layer in one tensor
        prefix = name.split(".experts.")[0] + ".experts."
        experts = [tensor for tensor in held if tensor.startswith(prefix)]
        if experts and not any(tensor.startswith(prefix) for tensor in unreadable):
            return experts
    return [] if unreadable else [""]
