"""Code of the user's own where the configuration offers a choice: `{kind: function, path: my_loss.py:tanh}`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field

from dapo_mega.algorithms.own_code import MisuseError, check_call, described, load_function
from dapo_mega.declared import FunctionPath, Section
from dapo_mega.errors import InputError

_loaded: dict[tuple[str, str, tuple[str, ...]], partial[Any]] = {}


class OwnCode(Section):
    """A function or class of your own in place of a built-in choice."""

    kind: Literal["function"] = "function"
    """function: code of your own."""
    path: FunctionPath
    """FILE.py:NAME, relative to this file, or package.module:NAME. Every trainer process loads it. NAME is a function,
    or a class that is made once with the settings and then called."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, beside what it is given."""

    key: ClassVar[str]
    """The key of the configuration under which the section stands."""

    def call(self, **given: Any) -> Any:
        """What the code returns for `given`, which are positional arguments. Raises InputError if it cannot be used."""
        function = self.loaded(*given)
        try:
            return function(*given.values())
        except Exception as error:
            raise self.raised("it", error) from error

    def loaded(self, *given: str) -> partial[Any]:
        """What is called with arguments of these names, loaded once. Raises InputError if there is no such code."""
        try:
            return _prepared(self.path, self.settings, given)
        except MisuseError as error:
            raise self.unusable(error) from error.__cause__

    def raised(self, what: str, error: Exception) -> InputError:
        """The error of a part of the code that raised this one."""
        return self.unusable(f"{what} raises {described(error, self.path.rpartition(':')[0])}")

    def unusable(self, problem: object) -> InputError:
        """The error of code that cannot be used."""
        return InputError(f"{self.key}: {self.path or self.kind}: {problem}")

    def try_out(self, group_size: int) -> None:
        """Call the code with something made up. Raises InputError if it cannot be used."""
        raise NotImplementedError


def try_own_code(sections: Iterable[OwnCode], group_size: int) -> None:
    """Load the code as it is now, as a notebook's user may have changed it, and try it out. Within a run it stays as it
    was. Raises InputError if it cannot be used."""
    _loaded.clear()
    for section in sections:
        section.try_out(group_size)


def _prepared(path: str, settings: Mapping[str, Any], given: tuple[str, ...]) -> partial[Any]:
    """The function with its settings, or the object that the class made of them; loaded once."""
    key = (path, repr(settings), given)
    if key in _loaded:
        return _loaded[key]
    function = load_function(path)
    if inspect.isclass(function) and given:  # Without arguments the class itself is what is called.
        check_call(function, (), settings)
        try:
            made = function(**settings)
        except Exception as error:
            raise MisuseError(f"it raises {described(error, path.rpartition(':')[0])}") from error
        if not callable(made):
            raise MisuseError("what the class makes cannot be called; give it a method __call__")
        check_call(made, given, {})
        _loaded[key] = partial(made)
    else:
        check_call(function, given, settings)
        _loaded[key] = partial(function, **settings)
    return _loaded[key]
