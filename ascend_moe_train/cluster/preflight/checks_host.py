"""Checks of each host by itself: clock, disk, memory, limits, names. Pure."""

import statistics
from collections.abc import Iterator, Mapping

from ascend_moe_train.cluster.host_words import is_loopback
from ascend_moe_train.cluster.preflight.model import (
    Answers,
    Check,
    Job,
    Outcome,
    Request,
    Seen,
    bad,
    command,
    differing,
    good,
    one_line,
    unknown,
    usual,
)
from ascend_moe_train.units import format_bytes

# Of these, all hosts need the same; the exceptions say who a host is.
PREFIXES = ("HCCL_", "ASCEND_", "MS_", "GLOG_", "OMP_", "NCCL_", "GLOO_")
OWN = frozenset({"HCCL_IF_IP", "MS_WORKER_IP", "MS_NODE_ID", "MS_NODE_RANK", "ASCEND_DEVICE_ID"})
LEAST_SHARED_BYTES = 2**30
LEAST_LIMITS = {"NOFILE": 4_096, "NPROC": 4_096}
MOST_NAMES = 64
THP = "/sys/kernel/mm/transparent_hugepage/enabled"


def _host_reads(job: Job) -> Mapping[str, Request]:
    return {"host": {"kind": "host", "prefixes": list(PREFIXES)}}


def _judge_clock(seen: Seen) -> Iterator[Outcome]:
    """Against the middle of all clocks, the one here among them."""
    known = [each.offset_s for each in seen.answers if each.offset_s is not None]
    middle_s = statistics.median_low([0.0, *known])
    for each in seen.answers:
        if each.offset_s is None:
            yield unknown(each, "date gives no time")
            continue
        off_s = each.offset_s - middle_s
        found = f"{abs(off_s):.2f} s {'behind' if off_s < 0 else 'ahead'} (measured within {each.error_s:.2f} s)"
        if abs(off_s) - each.error_s > seen.job.most_offset_s:
            yield bad(each, found, ("chronyc", "makestep"))
        else:
            yield good(each, found)


def _sync_reads(job: Job) -> Mapping[str, Request]:
    return {
        "timedatectl": command("timedatectl", "show", "--property=NTPSynchronized", "--value", timeout_s=5),
        "chronyc": command("chronyc", "-n", "tracking", timeout_s=5),
        "ntpq": command("ntpq", "-pn", timeout_s=5),
    }


def _judge_sync(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        says = answers.get("timedatectl")
        chrony, ntp = answers.get("chronyc"), answers.get("ntpq")
        is_good = "yes" in says.out.split() or any(line.startswith("*") for line in ntp.out.splitlines())
        if is_good or (chrony.code == 0 and "Leap status     : Normal" in chrony.out):
            return None
        if all(each.is_missing for each in (says, chrony, ntp)):
            return unknown(answers, "there is no timedatectl, chronyc or ntpq")
        return bad(answers, "no time source is in use", ("systemctl", "enable", "--now", "chronyd"))

    return seen.judged(judge)


def _disk_reads(job: Job) -> Mapping[str, Request]:
    if job.folder is None:
        return {}
    return {"disk": {"kind": "disk", "path": job.folder, "write_bytes": job.write_bytes, "timeout_s": 5}}


def _judge_disk(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        job, reading, facts = seen.job, answers.get("disk"), answers.facts("disk")
        if job.folder is None:
            return unknown(answers, "no run file, and no --folder")
        free_bytes, speed = facts.get("free_bytes"), facts.get("bytes_per_s")
        if not isinstance(free_bytes, int):
            return bad(answers, f"{job.folder} cannot be written: {reading.said}", ("mkdir", "-p", job.folder))
        where = one_line(str(facts.get("folder")))
        if free_bytes < job.need_bytes:
            needed = f"{format_bytes(job.need_bytes)} needed"
            return bad(answers, f"{where} has {format_bytes(free_bytes)} free, {needed}", ("df", "-h", job.folder))
        if not isinstance(speed, float):
            return bad(answers, f"{where} has {format_bytes(free_bytes)} free", ("df", "-h", job.folder))
        if speed < job.least_bytes_per_s:
            least = f"{format_bytes(job.least_bytes_per_s)}/s"
            return bad(answers, f"{where} takes {format_bytes(speed)}/s, at least {least} is wanted")
        return good(answers, f"{format_bytes(free_bytes)} free, {format_bytes(speed)}/s")

    return seen.judged(judge)


def _judge_shared(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        free_bytes = answers.facts("host").get("shared_free_bytes")
        if not isinstance(free_bytes, int):
            return unknown(answers, answers.get("host").said)
        found = f"{format_bytes(free_bytes)} free in /dev/shm"
        fix = ("mount", "-o", "remount,size=16G", "/dev/shm")
        return bad(answers, found, fix) if free_bytes < LEAST_SHARED_BYTES else good(answers, found)

    return seen.judged(judge)


def _judge_limits(seen: Seen) -> Iterator[Outcome]:
    def judge(answers: Answers) -> Outcome | None:
        limits = answers.facts("host").get("limits")
        if not isinstance(limits, dict):
            return unknown(answers, answers.get("host").said)
        low = [
            f"{name.lower()} {limits[name]:,}, {wanted:,} wanted"
            for name, wanted in LEAST_LIMITS.items()
            if isinstance(limits.get(name), int) and limits[name] < wanted
        ]
        return bad(answers, "; ".join(low)) if low else None

    return seen.judged(judge)


def _pages_reads(job: Job) -> Mapping[str, Request]:
    return {
        "thp": {"kind": "file", "path": THP},
        "hugepages": {"kind": "file", "path": "/proc/sys/vm/nr_hugepages"},
    }


def _judge_pages(seen: Seen) -> Iterator[Outcome]:
    def value(answers: Answers) -> str | None:
        thp, pages = answers.get("thp"), answers.get("hugepages")
        if thp.code != 0 or pages.code != 0:
            return None
        chosen = thp.out.partition("[")[2].partition("]")[0]
        return f"transparent {chosen or thp.out.strip()}, {pages.out.strip()} reserved"

    return differing(seen, value, "the setting")


def _judge_hardware(seen: Seen) -> Iterator[Outcome]:
    def value(answers: Answers) -> str | None:
        facts = answers.facts("host")
        memory_bytes = facts.get("memory_bytes")
        if not isinstance(memory_bytes, int):
            return None
        return f"{facts.get('machine')}, {facts.get('cores')} cores, {memory_bytes / 2**30:.0f} GiB"

    return differing(seen, value, "it has")


def _judge_hostname(seen: Seen) -> Iterator[Outcome]:
    first: dict[str, str] = {}
    for each in seen.answers:
        first.setdefault(str(each.facts("host").get("hostname")), each.host.name)

    def judge(answers: Answers) -> Outcome | None:
        name = answers.facts("host").get("hostname")
        if not isinstance(name, str):
            return unknown(answers, answers.get("host").said)
        fix = ("hostnamectl", "set-hostname", answers.host.name)
        if is_loopback(name):
            return bad(answers, f"it calls itself {one_line(name)}", fix)
        if first[name] != answers.host.name:
            return bad(answers, f"it calls itself {one_line(name)}, as {first[name]} does", fix)
        return None

    return seen.judged(judge)


def _name_reads(job: Job) -> Mapping[str, Request]:
    names = [host.address for host in job.hosts][:MOST_NAMES]
    return {"names": {"kind": "names", "names": names}}


def _judge_names(seen: Seen) -> Iterator[Outcome]:
    """What a name means on most hosts is right."""
    asked = [host.address for host in seen.job.hosts][:MOST_NAMES]
    found = {each.host.name: each.facts("names") for each in seen.answers}
    right = {name: usual([repr(facts.get(name)) for facts in found.values()]) for name in asked}

    def judge(answers: Answers) -> Outcome | None:
        facts = found[answers.host.name]
        if not facts:
            return unknown(answers, answers.get("names").said)
        for name in asked:
            addresses = facts.get(name)
            if not isinstance(addresses, list):
                return bad(answers, f"{name} has no address: {one_line(str(addresses))}", ("getent", "hosts", name))
            if len(asked) > 1 and any(is_loopback(str(each)) for each in addresses):
                return bad(answers, f"{name} is {one_line(', '.join(map(str, addresses)))}", ("getent", "hosts", name))
            if repr(addresses) != right[name]:
                shown = one_line(", ".join(map(str, addresses)))
                return bad(answers, f"{name} is {shown}, elsewhere {one_line(right[name] or '')}")
        return None

    return seen.judged(judge)


def _judge_environment(seen: Seen) -> Iterator[Outcome]:
    def of(answers: Answers) -> Mapping[str, str]:
        found = answers.facts("host").get("environment")
        return {name: str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    found = {each.host.name: of(each) for each in seen.answers}
    names = sorted({name for own in found.values() for name in own} - OWN)
    right = {name: usual([own.get(name) for own in found.values()]) for name in names}

    def judge(answers: Answers) -> Outcome | None:
        own = found[answers.host.name]
        wrong = [
            f"{name}={own.get(name, '(unset)')}, most hosts have {'(unset)' if right[name] is None else right[name]}"
            for name in names
            if own.get(name) != right[name]
        ]
        return bad(answers, one_line("; ".join(wrong))) if wrong else None

    return seen.judged(judge)


CHECKS = (
    Check(
        name="clock",
        group="host",
        what="clocks agree",
        how="date +%s.%N over SSH, three times, the quickest counts",
        rule="no more than --max-offset seconds from the middle of all clocks, beyond what the measuring leaves open",
        why="what happened first is told by time stamps, and certificates, file systems and makefiles go by them too",
        remedy="let chrony or ntpd set the clock from one source for all hosts, at once: chronyc makestep",
        judge=_judge_clock,
    ),
    Check(
        name="time source",
        group="host",
        what="the clock is kept by a time source",
        how="timedatectl show --property=NTPSynchronized, chronyc -n tracking, ntpq -pn",
        rule="one of them says that the clock is synchronised",
        why="a clock that is right today and free will be wrong in a long run",
        remedy="start chrony or ntpd with a server that it reaches",
        judge=_judge_sync,
        reads=_sync_reads,
    ),
    Check(
        name="disk",
        group="host",
        what="checkpoints have room, and a disk that takes them in time",
        how="statvfs of the folder, and a file of up to 64 MB that is written, flushed to the disk and removed",
        rule="free bytes at least those of the checkpoints that are kept and one more; at least --min-write MB/s",
        why="a disk that is full or slow is found at the first checkpoint, hours after the start",
        remedy="make room, mount another disk there, or choose another run.dir",
        judge=_judge_disk,
        reads=_disk_reads,
    ),
    Check(
        name="shared memory",
        group="host",
        what="/dev/shm is large enough",
        how="statvfs of /dev/shm",
        rule="1 GiB free",
        why="ranks of one host, and MindSpore's data workers, talk through it; in a container it has 64 MB by default",
        remedy="mount it larger, in a container with --shm-size=16g, and remove what dead runs left in it",
        judge=_judge_shared,
        reads=_host_reads,
    ),
    Check(
        name="limits",
        group="host",
        what="limits of open files and processes",
        how="getrlimit in a session over SSH, which has what ranks will have",
        rule="4,096 open files, and 4,096 processes",
        why="every rank has a socket for each other rank of its groups, and threads count as processes",
        remedy="raise nofile and nproc in /etc/security/limits.d for this user, and log in anew",
        judge=_judge_limits,
        reads=_host_reads,
    ),
    Check(
        name="huge pages",
        group="host",
        what="huge pages are set alike",
        how=f"{THP} and /proc/sys/vm/nr_hugepages",
        rule="the same as on most hosts",
        why="a host with other settings is slower or has less memory, and all wait for it",
        remedy="set both as on the other hosts",
        judge=_judge_pages,
        reads=_pages_reads,
    ),
    Check(
        name="hardware",
        group="host",
        what="hosts are alike",
        how="uname, sched_getaffinity, memory pages",
        rule="architecture, usable cores and memory as on most hosts",
        why="all ranks wait for the slowest host, and the one with the least memory runs out first",
        remedy="leave the host out, or find out what its container or cgroup withholds",
        judge=_judge_hardware,
        reads=_host_reads,
    ),
    Check(
        name="hostname",
        group="host",
        what="every host has a name of its own",
        how="gethostname",
        rule="no other host has it, and it is not localhost",
        why="MindSpore numbers the devices of a host by its name: two hosts of one name get each other's",
        remedy="give each host its own name: hostnamectl set-hostname",
        judge=_judge_hostname,
        reads=_host_reads,
    ),
    Check(
        name="names",
        group="host",
        what="names of hosts mean the same everywhere",
        how="getaddrinfo of what the hostfile has, on every host (the first 64 names)",
        rule="the same addresses as on most hosts, and no loopback address",
        why="a name that a host takes for itself, or for another, makes it wait for a rank that never comes",
        remedy="correct /etc/hosts or the DNS of that host; or write addresses into the hostfile",
        judge=_judge_names,
        reads=_name_reads,
    ),
    Check(
        name="environment",
        group="host",
        what="variables that ranks read are equal",
        how=f"the environment of a session over SSH: {', '.join(f'{each}*' for each in PREFIXES)}",
        rule="the same value as on most hosts",
        why="ranks with other time-outs, buffers or algorithms of HCCL wait for each other, or fail alone",
        remedy="set it for all hosts alike, or nowhere; look in ~/.bashrc, ~/.ssh/environment and /etc/environment",
        judge=_judge_environment,
        reads=_host_reads,
    ),
)
