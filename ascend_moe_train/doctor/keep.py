"""The verdict on a run that has failed, kept beside its logs. Pure."""

import json
from pathlib import Path

from ascend_moe_train.doctor.diagnose import diagnose
from ascend_moe_train.doctor.reading import METRICS_NAME, VERDICT_NAME
from ascend_moe_train.doctor.rule import rule_book
from ascend_moe_train.doctor.words import as_json, filled_remedies
from ascend_moe_train.whole_file import write_text_whole

LAUNCHER_LOG = "launcher.log"


def kept_verdict(run_dir: Path, log_folder: Path, run_id: str, message: str) -> str | None:
    """Keeps what the launcher said of a failure, and the doctor's verdict on it and on all logs.

    Returns one line, None where the doctor found nothing, or nothing beyond a mistake in the configuration that the
    message's only line tells. Raises OSError: nothing can be written.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    with (log_folder / LAUNCHER_LOG).open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"--- start {run_id}\n{message}\n")
    metrics = run_dir / METRICS_NAME
    verdict = diagnose([log_folder, *([metrics] if metrics.is_file() else [])])
    book, path = rule_book(), log_folder / VERDICT_NAME
    write_text_whole(path, json.dumps(as_json(verdict, book), indent=2, ensure_ascii=False))
    cause = verdict.cause
    if cause is None or ("\n" not in message and cause.rule.group == "config_env"):
        return None
    means = cause.filled(cause.rule.words("en").means)
    remedies = filled_remedies(cause, verdict, book)
    todo = f"; to do: {remedies[0].do}" if remedies else ""
    who = f"{cause.who_words}: " if cause.who_words else ""
    return f"doctor: {who}{means} (sure: {verdict.confidence}){todo}; all of it: {path}"
