"""The tree of exceptions that composer_ds raises on purpose.

Every message says what was given, what is allowed and why, and what to write instead. Problems of a configuration are
collected and raised together, on every rank alike and before the first collective, so that no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    'CheckpointError',
    'ComposerDSError',
    'ConfigError',
    'EnvironmentProblem',
    'ModelOutputError',
    'TrainingError',
]


class ComposerDSError(Exception):
    """Base of all exceptions raised by composer_ds."""


class ConfigError(ComposerDSError, ValueError):
    """A setting is wrong, or two settings disagree.

    Args:
        problems (str | Sequence[str]): One sentence or paragraph for each problem; all of them are shown.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            lines = [f'{len(self.problems)} problems:']
            lines += [f'  {number}. {problem}' for number, problem in enumerate(self.problems, start=1)]
            message = '\n'.join(lines)
        super().__init__(message)

    def __reduce__(self):
        return type(self), (self.problems,)


class CheckpointError(ComposerDSError, RuntimeError):
    """A checkpoint was not written, or is not complete; raised on every rank."""


class EnvironmentProblem(ComposerDSError, RuntimeError):
    """Something that the machine must provide is missing: a package, a compiler, a launcher's variables."""


class ModelOutputError(ComposerDSError, TypeError):
    """The model's forward returned something whose gradients DeepSpeed cannot follow."""


class TrainingError(ComposerDSError, RuntimeError):
    """Training cannot go on without being silently wrong."""
