"""YAML files of TRL and Axolotl, converted line by line, so that their comments stay. No torch."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml

from ...messages import SettingError, show, warn
from ...settings.resolve import FIELDS
from ...settings.trl_correction import PREFIX_OF_TRL
from ..formats import yaml_lines
from .counterparts import to_trl
from .dotted_settings import estimator_of, read_verl, refuse_skyrl
from .own_settings import tell_effects
from .setting_files import leaves, read_document, read_yaml
from .trl import from_trl
from .verl import NOT_SET, split_verl


# Names any of which marks a file as TRL's or Axolotl's
_OF_TRL = {
    "base_model",
    "gradient_accumulation_steps",
    "learning_rate",
    "max_completion_length",
    "max_steps",
    "model_name_or_path",
    "num_generations",
    "num_iterations",
    "num_train_epochs",
    "output_dir",
    "per_device_train_batch_size",
    "plugins",
    "reward_funcs",
    "steps_per_generation",
    "use_vllm",
    "vllm_mode",
}
# Names that only one of TRL's trainers has
_OF_GRPO = {
    *("cast_lm_head_to_fp32", "delta", "importance_sampling_level", "loss_type", "multi_objective_aggregation"),
    *("off_policy_mask_threshold", "scale_rewards", "top_entropy_quantile", "use_bias_correction_kl"),
}
_OF_RLOO = {"normalize_advantages", "reward_clip_range"}
_OF_ASYNCHRONOUS = {
    "max_inflight_tasks",
    "max_staleness",
    "queue_maxsize",
    "vllm_server_base_url",
    "weight_sync_steps",
}
_NAMES = {"grpo": "GRPO", "rloo": "RLOO", "async_grpo": "asynchronous GRPO"}
_OLD_NAME, _NEW_NAME = f"{PREFIX_OF_TRL}cap", f"{PREFIX_OF_TRL}clip_max"
_PLUGIN = "trl_rollout_corr.axolotl.RolloutCorrectionPlugin"


def is_of_trl(content: Mapping[str, Any], of_trl: Mapping[str, Any]) -> bool:
    """True for a file of TRL or Axolotl, in which `of_trl` are the fields of TRL."""
    marks = _OF_TRL | _OF_RLOO | _OF_ASYNCHRONOUS
    return bool(content.keys() & marks) or any(str(key).startswith(PREFIX_OF_TRL) for key in of_trl)


def convert_trl_file(
    text: str, content: Mapping[str, Any], node: yaml.Node | None, of_trl: Mapping[str, Any], named: str | None
) -> str:
    """
    The YAML of TRL, or of Axolotl, for the trainer that is `named`, or that its settings tell. Otherwise it is taken
    for GRPO's, and a warning says so if another trainer would change the answer.
    """
    trainer = named or _trainer_of(of_trl) or estimator_of(content) or ("grpo" if of_trl is not content else None)
    if trainer is not None:
        return _convert_for(trainer, text, content, node, of_trl)
    return _convert_as_grpos(text, content, node, of_trl)


def _convert_as_grpos(text: str, content: Mapping[str, Any], node: yaml.Node | None, of_trl: Mapping[str, Any]) -> str:
    """The YAML of TRL for GRPO, with a warning that names the trainers that would get another answer."""
    answers = {}
    for name in _NAMES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                answers[name] = _convert_for(name, text, content, node, of_trl), caught
            except (ValueError, TypeError):
                if name == "grpo":
                    raise
    answer, said = answers.pop("grpo")
    for warning in said:
        show(warning.message)
    of_answer = answer, [str(warning.message) for warning in said]
    others = [name for name, (text, more) in answers.items() if (text, [str(x.message) for x in more]) != of_answer]
    if others:
        written = " or ".join(f"`--trainer {name}` if it is {_NAMES[name]}" for name in others)
        warn(
            "The file is taken for one of GRPO, because no setting in it tells the trainer, and another trainer gets "
            f"another answer: add {written}."
        )
    return answer


def _convert_for(
    trainer: str, text: str, content: Mapping[str, Any], node: yaml.Node | None, of_trl: Mapping[str, Any]
) -> str:
    """
    The YAML of TRL, or of Axolotl with TRL's fields below `trl`, plus the line that keeps TRL's own correction, or the
    fields for a section of verl in it, which is removed. Comments and all other lines stay.
    """
    refuse_skyrl(dict(leaves(content)))
    sections = _foreign_sections(content)
    if ours := _own_fields(sections, content):
        warn(
            f"The file has fields of this package already (`{next(iter(ours))}`), needs no conversion, and is printed "
            "as it is."
        )
        tell_effects(ours, of_trl, trainer)
        return text
    from_trl({key: value for key, value in of_trl.items() if str(key).startswith(PREFIX_OF_TRL)})  # raises an error
    is_axolotls = of_trl is not content
    if of_trl.get(_OLD_NAME) is not None:
        text, content, node = _with_new_name(text, content, node, is_axolotls)
    kept = {name: value for name, value in content.items() if name not in sections}
    fields: dict[str, Any] = {"rollout_correction": "trl"}
    added: dict[str, Any] = {}
    if sections:
        fields, added = _translate({name: content[name] for name in sections}, kept, trainer)
    tell_effects(fields, {**added, **of_trl}, trainer)
    expected = {**kept, **added, **fields}
    plugins = _new_plugins(content) if is_axolotls else []
    if plugins:
        expected["plugins"] = plugins
    edited = _edited(text, node, sections, {**added, **fields}, plugins)
    return edited if _reads_as(edited, expected) else _written_anew(expected)


def _own_fields(sections: list[str], content: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of this package in a file. Raises an error if sections of verl stand beside them."""
    ours = {name: value for name, value in content.items() if name in FIELDS and name not in sections}
    if ours and sections:
        name, value = next(iter(ours.items()))
        raise SettingError(name, value, f"beside `{sections[0]}`, a section of verl", remedy="Remove one of the two.")
    return ours


def _with_new_name(
    text: str, content: Mapping[str, Any], node: yaml.Node | None, is_axolotls: bool
) -> tuple[str, Mapping[str, Any], yaml.Node | None]:
    """A file in which an old name of TRL is the new one: its text, its content and its tree."""
    fields = node
    if is_axolotls and isinstance(node, yaml.MappingNode):
        [fields] = [value for key, value in node.value if key.value == "trl"]
    assert isinstance(fields, yaml.MappingNode)
    keys = {key.value: key for key, _ in fields.value}
    if _NEW_NAME in keys:
        warn(f"`{_OLD_NAME}` is an old name of `{_NEW_NAME}`, and acts in its place: remove one of them.", _OLD_NAME)
        return text, content, node
    warn(f"`{_OLD_NAME}` is an old name, which TRL 2 will remove: the result has `{_NEW_NAME}`.", _OLD_NAME)
    place = keys[_OLD_NAME]
    text = text[: place.start_mark.index] + _NEW_NAME + text[place.end_mark.index :]
    return text, *read_document(text)


def _new_plugins(content: Mapping[str, Any]) -> list[object]:
    """The list of plugins of a file of Axolotl with the one of this package; empty if it is in the list."""
    plugins = content.get("plugins") or []
    if _PLUGIN in plugins:
        return []
    if not isinstance(plugins, list):
        raise SettingError("plugins", plugins, allowed="a list of names")
    return [*plugins, _PLUGIN]


def _edited(
    text: str, node: yaml.Node | None, sections: list[str], new: Mapping[str, Any], plugins: list[object]
) -> str:
    """
    The text of a file without the lines of its sections of verl, and with lines of new fields and plugins.
    """
    text = _without_lines(text, node, sections)
    lines = yaml_lines(new)
    if len(plugins) > 1:  # the file has a list already
        text = _with_plugin(text, read_document(text)[1])
    elif plugins:
        lines += f"plugins:\n- {_PLUGIN}\n"
    return text.rstrip() + "\n" + lines


def _reads_as(text: str, expected: Mapping[str, Any]) -> bool:
    with suppress(ValueError):
        return bool(read_yaml(text) == expected)
    return False


def _written_anew(content: Mapping[str, Any]) -> str:
    warn("The file cannot be edited line by line, so that it is written anew, without its comments.")
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=1000, default_flow_style=False)


def _trainer_of(of_trl: Mapping[str, Any]) -> str | None:
    """The only trainer whose configuration takes one of these fields of TRL; `None` without such a field."""
    if not _OF_ASYNCHRONOUS.isdisjoint(of_trl):
        return "async_grpo"
    if not _OF_RLOO.isdisjoint(of_trl):
        return "rloo"
    is_grpo = not _OF_GRPO.isdisjoint(of_trl) or any(str(name).startswith(PREFIX_OF_TRL) for name in of_trl)
    return "grpo" if is_grpo else None


def _foreign_sections(content: Mapping[str, Any]) -> list[str]:
    """Names of the sections of verl in a file of TRL that have settings of a correction."""
    found = []
    for name in ("rollout_correction", "algorithm", "actor_rollout_ref"):
        if isinstance(content.get(name), Mapping):
            section = split_verl(dict(leaves({name: content[name]})))[0]
            if section is not NOT_SET or name == "actor_rollout_ref":
                found.append(name)
    return found


def _translate(
    sections: Mapping[str, Any], kept: Mapping[str, Any], trainer: str
) -> tuple[dict[str, Any], dict[str, object]]:
    """
    Fields for sections of verl, and fields of TRL's `trainer` for their other settings that the rest of the
    file lacks.
    """
    settings = dict(leaves(sections))
    fields, others = read_verl(settings, from_command=False)
    added = to_trl(others, trainer)
    for name in added.keys() & kept.keys():
        value = added.pop(name)
        if value != kept[name]:
            warn(
                f"`{name}` is {kept[name]!r} in the file, and {value!r} in a section of verl, which is left out.",
                name,
            )
    named = ", ".join(f"`{name}`" for name in sections)
    warn(f"{named}: this section of verl, which no trainer of TRL reads, is translated and removed.")
    return fields, added


def _without_lines(text: str, node: yaml.Node | None, names: list[str]) -> str:
    """The text of a file without the lines of some of its settings."""
    if not names or not isinstance(node, yaml.MappingNode):
        return text
    lines = text.splitlines(keepends=True)
    for key, value in reversed(node.value):
        if key.value in names:
            del lines[key.start_mark.line : _last_line(value) + 1]
    return "".join(lines)


def _last_line(node: yaml.Node) -> int:
    """Number of the last line of a value. A block ends with its last value, before blank lines and comments."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style or not node.value:
        mark = node.end_mark
        return int(mark.line - (mark.column == 0 and mark.line > node.start_mark.line))
    last = node.value[-1]
    return _last_line(last[1] if isinstance(last, tuple) else last)


def _with_plugin(text: str, node: yaml.Node | None) -> str:
    """The text of a file of Axolotl with one more entry in its list of plugins."""
    assert isinstance(node, yaml.MappingNode)
    [plugins] = [value for key, value in node.value if key.value == "plugins"]
    last = plugins.value[-1]
    if plugins.flow_style:
        return f"{text[: last.end_mark.index]}, {_PLUGIN}{text[last.end_mark.index :]}"
    lines = text.splitlines(keepends=True)
    lines[last.end_mark.line] = lines[last.end_mark.line].rstrip("\n") + "\n"
    return "".join(
        [
            *lines[: last.end_mark.line + 1],
            f"{' ' * plugins.start_mark.column}- {_PLUGIN}\n",
            *lines[last.end_mark.line + 1 :],
        ]
    )
