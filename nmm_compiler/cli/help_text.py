"""Help of commands: paragraphs are wrapped to the terminal, and switches take no value."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command whose help shows no type for a switch: `--check <bool>` looks as if it took one."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, --help too."""
        return without_types_of_switches(super().get_params(ctx))


class WrappedHelp(TyperGroup):
    """Commands whose docstrings are read as paragraphs: an empty line ends one."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the group itself, --help too."""
        return without_types_of_switches(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, its help one line a paragraph, or None when there is none."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help:
            command.help = one_line_a_paragraph(command.help)
        return command


def without_types_of_switches(parameters: list[Any]) -> list[Any]:
    """Return the parameters; the help shows nothing beside those that are on or off."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


def one_line_a_paragraph(text: str) -> str:
    """Return `text` with the lines of each paragraph joined."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
