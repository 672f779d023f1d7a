"""Group of commands whose help is wrapped to the terminal, not where its docstring is wrapped."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class WrappedHelp(TyperGroup):
    """Commands whose docstrings are read as paragraphs: an empty line ends one."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, its help one line a paragraph, or None when there is none."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help:
            command.help = one_line_a_paragraph(command.help)
        return command


def one_line_a_paragraph(text: str) -> str:
    """Return `text` with the lines of each paragraph joined."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
