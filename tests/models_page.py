"""The table of families in docs/models.md: `python -m tests.models_page` writes it anew."""

from __future__ import annotations

from pathlib import Path

from asyncllm.gpu.transformers_model.families import TESTED

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
START = "<!-- families: python -m tests.models_page -->\n"
END = "<!-- end of families -->\n"


def with_table(page: str) -> str:
    """The page with the table as the code has it."""
    before, rest = page.split(START)
    _, after = rest.split(END)
    lines = ["| architecture | what it brings |", "|---|---|"]
    lines += [f"| `{name}` | {brings} |" for name, brings in TESTED.items()]
    table = "\n".join(lines)
    return f"{before}{START}\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
