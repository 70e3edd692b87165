"""
Fingerprints of the weights that are sent to vLLM, and of the weights that vLLM holds. This runs in the process of the
engine, which may be a server.

vLLM fuses weights, and packs them for its CPU kernels. So the fingerprint of a tensor in vLLM covers all elements in
any order, and the fingerprint of a tensor that is sent covers a few columns: if these columns change, the whole tensor
must. Where vLLM keeps the layout of a weight, the same columns are read there as well, of all rows: each part of a
fused tensor, and each expert, must then have the values that were sent.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

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
    return _fingerprint_bits(bits)


def _fingerprint_bits(bits: torch.Tensor) -> torch.Tensor:
    """Fingerprints, `(...,)`, of some matrices, `(..., R, C)`."""
    rows, columns = (_hash(bits.sum(dim, dtype=torch.int64)) for dim in (-1, -2))
    return rows.sum(-1) + 3 * columns.sum(-1)


def _hash(sums: torch.Tensor) -> torch.Tensor:
    """Hash of each number and its place in the last dimension: the finaliser of SplitMix64, modulo 2^64."""
    x = sums + torch.arange(sums.shape[-1], device=sums.device) * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return x ^ (x >> 31)


def some_columns(x: torch.Tensor) -> torch.Tensor:
    """
    A few columns of a matrix or of a layer's experts, or a whole vector, [`in_one_form`]. NaN becomes 0, because it
    comes in many forms.
    """
    return in_one_form(_some(x) if x.dim() > 1 else x)


def in_one_form(x: torch.Tensor) -> torch.Tensor:
    """Numbers without what kernels store in several ways: NaN, -0, and what is too small for some of them."""
    x = x.nan_to_num(nan=0.0)
    return torch.where(x.abs() <= torch.finfo(torch.float32).tiny, 0, x)


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


def packed_experts(experts: Any, packed: torch.Tensor, *, gates: bool) -> torch.Tensor | None:
    """
    The same columns, `(E, R, 4)`, of weights packed for a CPU kernel, `(E, R', C')`, or a part of them in 4 columns of
    each expert; `None` if the order is unknown. `experts` is vLLM's object that has packed them, and that first adds
    zeros to the intermediate size: columns, or, with `gates`, rows behind each half.
    """
    _, height, width = packed.shape
    padded = height // 2 if gates else width
    kept = int(experts.moe_config.intermediate_size_per_partition)
    columns = _some(torch.arange(width if gates else kept))
    places = _places_of_packed(height, width, packed.dtype, experts.isa)
    if places is None:
        return None
    found = packed.flatten(1)[:, places[:, columns]]
    return torch.cat([half[:, :kept] for half in found.split(padded, 1)], 1) if gates else found


@lru_cache(maxsize=8)
def _places_of_packed(height: int, width: int, dtype: torch.dtype, isa: str) -> torch.Tensor | None:
    """
    Place of each element in a packed matrix, `(height, width)`, which vLLM's packing of the places themselves shows,
    one byte at a time, as a type of 16 bits has no larger ones; `None` if it does more than order them.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    place = torch.arange(height * width).view(1, height, width)
    packed = torch.zeros(height * width, dtype=torch.int64)
    for low in range(0, (height * width).bit_length(), 8):
        byte = ((place >> low) & 255).to(dtype)
        packed += cpu_prepack_moe_weight(byte, isa).flatten().long() << low
    return packed.argsort().view(height, width) if torch.equal(packed.sort().values, place.flatten()) else None


def read_weights(model: Any, names: Iterable[str], group: Any = None) -> dict[str, Any]:
    """
    Weights that a model of vLLM holds, and the tensors where it puts some weights of the trainer's checkpoint, given
    by `names`.

    `held` maps each tensor of the model to its fingerprints, one for each form in which a layer keeps it, summed over
    `group`, the ranks that share the model. `places` maps each weight to the tensors that hold it, where that is
    certain; `""` means the whole model. A tensor into which vLLM fuses several weights counts as one for each of them,
    such as `qkv_proj.weight[k_proj]`. `values` has the fingerprint of the few columns that are compared of each
    weight, as they are held; it equals that of the weight only where vLLM keeps its layout. `quantised` lists tensors
    of 8 or 4 bits, and `unreadable` the weights held in another form. All consist of lists and numbers, because a
    server must send them.
    """
    read = _read_tensors(model, alone=group is None)
    held = _numbers({name: forms for name, forms in read.forms_of.items() if forms}, group)
    in_vllm = {name: _name_in_vllm(model, name) for name in names}
    parts_of: dict[str, list[str]] = {}
    for tensor in held:
        whole, bracket, _ = tensor.partition("[")
        if bracket:
            parts_of.setdefault(whole, []).append(tensor)
    without_form = {name for name, forms in read.forms_of.items() if not forms}
    found = {name: _place(known, name, held, parts_of, without_form) for name, known in in_vllm.items()}
    places = {name: place for name, place in found.items() if place}
    return {
        "held": held,
        "places": places,
        "values": _values(in_vllm, read.columns),
        "quantised": read.quantised,
        "unreadable": [name for name, known in in_vllm.items() if known is not None and name not in places],
    }


class _Tensors(NamedTuple):
    """Tensors of a model as read, by their name, or that of a fused part such as `qkv_proj.weight[k_proj]`."""

    forms_of: dict[str, list[torch.Tensor]]  # fingerprints, of which a tensor in another form has none
    columns: dict[str, torch.Tensor]  # the few that are compared
    quantised: list[str]


def _read_tensors(model: Any, *, alone: bool) -> _Tensors:
    """Read the tensors of a model. Only a rank that is `alone` has all of their columns."""
    found = _Tensors({}, {}, [])
    fused = getattr(model, "packed_modules_mapping", None) or {}
    of_memory: dict[Any, list[torch.Tensor]] = {}  # tied layers share the memory of their weights
    for prefix, layer in model.named_modules():
        for parameter, x in layer.named_parameters(recurse=False):
            name = f"{prefix}.{parameter}".replace(".base_layer.", ".")
            fused_names = fused.get(name.split(".")[-2:][0], [])
            packed = parameter == "weight" and x.dim() < 3 and hasattr(layer, "cpu_linear")
            columns = packed_columns(layer) if x.dtype in READABLE and packed and alone else None
            rows = columns.T if columns is not None else None if packed else x
            if alone and rows is not None and rows.dtype in READABLE and rows.numel():
                found.columns.update(_columns_held(layer, name, fused_names, rows))
            if parts := _parts(layer, fused_names, rows):
                found.forms_of.update({f"{name}[{part}]": [fingerprint(own)] for part, own in parts.items()})
                continue
            forms = of_memory.setdefault((x.data_ptr(), x.shape) if x.numel() else name, [])
            if x.dtype in QUANTISED:
                found.quantised.append(name)
            if x.dtype in _AS_BITS and x.numel() and not forms:
                forms.append(fingerprint(x))
            if columns is not None:
                forms.append(fingerprint(columns))
            found.forms_of[name] = forms
    return found


def _columns_held(layer: Any, name: str, names: list[str], rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    A few columns of a tensor: of all rows, of the rows of each weight that is fused into it, and of each expert.
    """
    if (known := getattr(layer, "org_vocab_size", None)) and rows.dim() == 2:
        rows = rows[:known]  # vLLM adds rows to a vocabulary
    few = _few(layer, name, rows)
    columns = {name: few, **{f"{name}[{part}]": some for part, some in _parts(layer, names, few).items()}}
    if few.dim() == 3:  # experts, (E, R, 4)
        half = few.shape[1] // 2
        columns |= {f"{name}[:]": few, f"{name}[:0]": few[:, :half], f"{name}[:1]": few[:, half:]}
    return columns


def _few(layer: Any, name: str, rows: torch.Tensor) -> torch.Tensor:
    """A few columns of a tensor with the rows of its weight, or all of it if it is a vector."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts = getattr(getattr(kernel, "impl", None), "fused_experts", None)
    if rows.dim() == 3 and hasattr(experts, "isa") and not getattr(experts, "_use_zentorch", False):
        found = packed_experts(experts, rows, gates=name.endswith("w13_weight"))
        if found is not None:
            return found
    return _some(rows) if rows.dim() > 1 else rows


def _values(in_vllm: dict[str, str | None], columns: dict[str, torch.Tensor]) -> dict[str, int]:
    """
    Fingerprint of each weight as it is held, by its name in the checkpoint. A weight that is not finite is left out:
    kernels that pack it spread a NaN.
    """
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    of_experts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, known in in_vllm.items():
        key, number = _key_of(known, name, columns)
        if key is None:
            continue
        some = columns[key]
        if number is None:
            found[name] = fingerprint(in_one_form(some)), some.isfinite().all()
            continue
        if key not in of_experts:
            bits = in_one_form(some).view(READABLE[some.dtype])
            of_experts[key] = _fingerprint_bits(bits), some.isfinite().flatten(1).all(1)
        each, finite = of_experts[key]
        if number < len(each):
            found[name] = each[number], finite[number]
    if not found:
        return {}
    together = torch.stack([torch.stack([x, finite.long()]) for x, finite in found.values()]).tolist()
    return {name: x for name, (x, finite) in zip(found, together, strict=True) if finite}


# A weight of one expert in a checkpoint: its layer, number and role
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.\w+\.weight")
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(\.weight)?")
# The tensor of vLLM that holds a role, and its half
_ROLES = {
    **dict.fromkeys(("gate_proj", "w1"), ("w13_weight", "[:0]")),
    **dict.fromkeys(("up_proj", "w3"), ("w13_weight", "[:1]")),
    **dict.fromkeys(("down_proj", "w2"), ("w2_weight", "[:]")),
    "gate_up_proj": ("w13_weight", ""),
}


def _key_of(name: str | None, sent: str, columns: dict[str, torch.Tensor]) -> tuple[str | None, int | None]:
    """
    The key of the columns of a weight that vLLM calls `name`, and the number of its expert; `None` if unknown, and for
    a weight of all experts. `sent` is its name in the checkpoint.
    """
    if name is None:
        return None, None
    own = f"{name}[{_own_name(sent)}]"
    if own in columns or name in columns:
        return own if own in columns else name, None
    one, together = _EXPERT.fullmatch(name), _EXPERTS.fullmatch(name)
    match = one or together
    tensor, half = _ROLES.get(_own_name(sent) if one else together[2] if together else "", ("", ""))
    of_layer = [key for key in columns if match and key.startswith(f"{match[1]}.") and key.endswith(f".{tensor}")]
    if not tensor or len(of_layer) != 1:
        return None, None
    return (of_layer[0] + half, int(one[2])) if one else (of_layer[0], None)


def _own_name(sent: str) -> str:
    """The name of the layer of a weight in a checkpoint, without its path."""
    return sent.split(".")[-2] if "." in sent else ""


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
