"""Files, folders, archives or a pipe in, a verdict out. Pure."""

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from io import BufferedIOBase
from pathlib import Path

from ascend_moe_train.doctor.event import Scanned
from ascend_moe_train.doctor.gather import gather
from ascend_moe_train.doctor.matcher import Matcher
from ascend_moe_train.doctor.prefix import actor_of_file
from ascend_moe_train.doctor.reading import Source, archived, blocks, found_sources, is_archive, opened
from ascend_moe_train.doctor.rule import RuleBook, rule_book
from ascend_moe_train.doctor.scan import scan
from ascend_moe_train.doctor.series import Series, log_series, run_series
from ascend_moe_train.doctor.training import training
from ascend_moe_train.doctor.verdict import Verdict, judge
from ascend_moe_train.errors import DataError

POOL_BYTES = 64 * 2**20  # less is read sooner than processes start
MAX_WORKERS = 8

Progress = Callable[[str, int, int], None]


def diagnose(paths: Sequence[Path], *, pipe: BufferedIOBase | None = None, tell: Progress | None = None) -> Verdict:
    """The verdict on what lies at the paths, or comes through a pipe. Raises DataError: a path that is not there, or an
    archive that is damaged, or nothing that could be a log."""
    scanned = scan_all(found_sources(paths), tell)
    if pipe is not None:
        scanned.append(scan_stream(Source(name="stdin", size_bytes=0), pipe, matcher()))
    series = run_series(paths)
    if not scanned and not series:
        raise DataError(f"{', '.join(map(str, paths))}: holds no file that could be a log")
    return verdict_of(scanned, rule_book(), series)


def verdict_of(scanned: Sequence[Scanned], book: RuleBook, metrics: Sequence[Series] = ()) -> Verdict:
    """The verdict on sources that have been read, and on what runs have measured."""
    evidence = gather(scanned)
    series = [*metrics, *log_series(scanned, evidence.source_ranks)]
    return judge(evidence, book, training(series, book))


@cache
def matcher() -> Matcher:
    """The package's rules, compiled once."""
    return Matcher(rule_book())


def scan_all(sources: Sequence[Source], tell: Progress | None = None) -> list[Scanned]:
    """All sources, by several processes where there is much to read. What cannot be read is said in `problem`."""
    plain = [source for source in sources if not is_archive(source)]
    total = sum(source.size_bytes for source in plain)
    found: list[Scanned] = []
    matcher()
    done = 0
    for source, each in zip(plain, _mapped(plain, total), strict=True):
        found.append(each)
        done += source.size_bytes
        if tell is not None:
            tell("reading", done, total)
    for source in sources:
        if is_archive(source):
            found += [scan_stream(inner, stream, matcher()) for inner, stream in archived(source)]
    return found


def _mapped(sources: Sequence[Source], total_bytes: int) -> Iterable[Scanned]:
    workers = min(multiprocessing.cpu_count(), MAX_WORKERS, len(sources))
    if total_bytes < POOL_BYTES or workers < 2:
        yield from map(_scan_file, sources)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(_scan_file, sources)


def _scan_file(source: Source) -> Scanned:
    try:
        with opened(source) as stream:
            return scan_stream(source, stream, matcher())
    except OSError as error:
        problem = error.strerror or str(error)
        return Scanned(name=source.name, actor=actor_of_file(source.name), problem=problem)


def scan_stream(source: Source, stream: BufferedIOBase, rules: Matcher) -> Scanned:
    """What a stream holds under the name of its source."""
    problems: list[str] = []
    found = scan(source.name, actor_of_file(source.name), blocks(stream, problems.append), rules)
    found.problem = problems[0] if problems else None
    return found
