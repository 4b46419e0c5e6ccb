"""Results as JSON for machines and as a table for people, with what they were measured on."""

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def machine() -> dict[str, str]:
    """Processor, cores, system, commit and date."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.date.today().isoformat(),
        "processor": f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def write_results(path: Path, title: str, text: str | None, rows: list[Row], notes: list[str], on: Row) -> None:
    """Writes `path`.json and `path`.md and prints the table."""
    path.with_suffix(".json").write_text(
        json.dumps({"title": title, "machine": on, "rows": rows, "notes": notes}, indent=2) + "\n"
    )
    head = list(rows[0])
    table = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    table += ["| " + " | ".join(str(row[key]) for key in head) + " |" for row in rows]
    where = ", ".join(f"{key} {value}" for key, value in on.items())
    lines = [f"# {title}", "", (text or "").strip(), "", *table, "", *notes, "", f"Measured on: {where}.", ""]
    path.with_suffix(".md").write_text("\n".join(lines))
    print("\n".join(table))
