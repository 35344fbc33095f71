"""TRL's parser of flags and YAML files, made strict: no guesses, and each mistake is reported in one line."""

import argparse
import copy
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from trl import TrlParser

from grpo.config.checks import CHOICES
from grpo.place.spelling import did_you_mean

MOST_USED = (
    "model_name_or_path",
    "dataset_name",
    "reward_funcs",
    "output_dir",
    "resume_from_checkpoint",
    "max_steps",
    "num_train_epochs",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "max_completion_length",
    "vllm_max_model_length",
    "temperature",
    "beta",
    "logging_steps",
    "save_steps",
    "report_to",
)


class UnknownArgumentsError(ValueError):
    """Flags or YAML keys that no option has."""


class StrictParser(TrlParser):
    """Rejects abbreviations, and raises ValueError instead of printing the usage and exiting."""

    def __init__(self, dataclass_types: Any, **kwargs: Any) -> None:
        super().__init__(dataclass_types, allow_abbrev=False, add_help=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the most used options, --help-all all)")


class TaskParser(StrictParser):
    """Parser for a whole task: refuses unknown names and values of a wrong type before any settings object is made.

    Args:
        own: names of the options shown by `--help` beside the most used ones.
        check: called with the values by name before settings objects are made; making them starts the process group.
    """

    def __init__(
        self,
        dataclass_types: Sequence[type],
        *,
        own: Iterable[str],
        check: Callable[[argparse.Namespace], None],
        **kwargs: Any,
    ) -> None:
        self._own = tuple(own)
        self._check = check
        self._unknown_keys: list[str] = []
        self._hints = {name: hint for kind in dataclass_types for name, hint in typing.get_type_hints(kind).items()}
        super().__init__(dataclass_types, **kwargs)
        self.add_argument("-h", "--help", action=_Help, help="show the most used options, and this project's own")
        self.add_argument("--help-all", action=_Help, help="show all options")

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Set defaults as TRL's parser does.

        Raises:
            ValueError: a value has another type than its setting.
        """
        for name, value in kwargs.items():
            if name in self._hints:
                _check_type(name, value, self._hints[name])
        unknown = super().set_defaults_with_config(**kwargs)
        self._unknown_keys += unknown[::2]
        return unknown

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; nothing may be unknown."""
        values, words = super().parse_known_args(args, namespace)
        flags = [word for word in words if re.match(r"-+[A-Za-z]", word)]
        if words or self._unknown_keys:
            known = [option for action in self._actions for option in action.option_strings]
            raise UnknownArgumentsError(unknown_arguments([*(flags or words), *self._unknown_keys], known))
        self._check(values)
        return values, words

    def format_short_help(self) -> str:
        """Format the most used options and this project's own."""
        actions = {action.dest: action for action in reversed(self._actions)}
        formatter = self._get_formatter()
        formatter.add_text(f"usage: {self.prog} [--config FILE.yaml] [--OPTION VALUE ...]")
        formatter.add_text(
            "Every option can be a key of the file that --config names; flags go before it. Without a model the demo "
            "runs, with the settings of configs/train/demo.yaml."
        )
        for title, names in (("most used", MOST_USED), ("this project's own", self._own)):
            formatter.start_section(title)
            formatter.add_arguments([_with_one_name(actions[name]) for name in names])
            formatter.end_section()
        formatter.add_text(f"--help-all shows all {len(actions)}: TRL's, and those of transformers' trainer.")
        return formatter.format_help()


class _Help(argparse.Action):
    """Prints the help and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(parser.format_help() if option_string == "--help-all" else parser.format_short_help(), end="")
        parser.exit()


def unknown_arguments(names: Sequence[str], known: Sequence[str]) -> str:
    """Return the message about unknown options, with suggestions."""
    parts = [name + did_you_mean(name.split("=")[0], known) for name in names]
    return (
        f"unknown arguments: {', '.join(parts)}. Fields of GRPOConfig, TRL's ModelConfig, DatasetMixtureConfig and "
        "GRPOScriptArguments can be given as flags or as keys of the --config file; --help-all lists them"
    )


def _with_one_name(action: argparse.Action) -> argparse.Action:
    shown = copy.copy(action)
    shown.option_strings = action.option_strings[:1]
    if shown.choices is None:
        name = getattr(shown.type, "__name__", "text")
        shown.metavar = {"string_to_bool": "BOOL", "str": "TEXT"}.get(name, name.upper())
        if shown.dest in CHOICES:
            shown.metavar = f"{{{','.join(CHOICES[shown.dest])}}}"
    return shown


def _check_type(name: str, value: Any, hint: Any) -> None:
    """Check the type of a YAML value. Strings are left to the parser, which reads them like flags.

    Raises:
        ValueError: the type is wrong; the message names the value and the type.
    """
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    outer = [typing.get_origin(kind) or kind for kind in kinds]
    known = tuple(kind for kind in outer if isinstance(kind, type)) + ((int,) if float in outer else ())
    if isinstance(value, str) or typing.Literal in outer or name == "reward_funcs":
        return
    is_known = isinstance(value, known) and (bool in known or not isinstance(value, bool))
    if value is None and not is_known:
        raise ValueError(f"{name} is left empty: write a value, or remove the line")
    others = {*known} - {str, type(None)}
    if others and not is_known:
        names = " or ".join(sorted(kind.__name__ for kind in others))
        raise ValueError(f"{name} is {value!r} ({type(value).__name__}), but has to be {names}")
