"""The doctor's verdicts on logs of several ranks: who was first, who only waits, and what cannot be told."""

import pytest

from ascend_moe_train.doctor.diagnose import matcher
from ascend_moe_train.doctor.figures import shortage_of
from tests.doctored import told, verdict_on

KILL_LINE = "[ERROR] ME(10:1,MainProcess):2026-03-01-10:00:09.100.000 [_api.py:1] "
WAIT = "RuntimeError: Launch kernel failed, name:Default/AllReduce-op7\n"
STEP = "step {step} loss 3.1\n"


def hccl(pid: int, clock: str, text: str) -> str:
    return f"[ERROR] HCCL({pid},python):2026-03-01-{clock}.100.200 [x.cc:1] [{pid}]{text}\n"


def task(pid: int, clock: str, name: str, index: int = 4) -> str:
    return hccl(
        pid, clock, f"Task run failed, base information is streamID:[2], tag[{name}_world_0], index[{index}], x."
    )


def remote(pid: int, clock: str, peer: str) -> str:
    return hccl(pid, clock, f"Task run failed, para information is notify id:[0x1], stage:[f], remote rank:[{peer}].")


def ranks(**logs: str) -> dict[str, str | bytes]:
    return {f"rank_{name.removeprefix('r')}.log": text for name, text in logs.items()}


def test_no_fault() -> None:
    log = STEP.format(step=1) + "[WARNING] DISTRIBUTED(1,7f,python):2026 Topology build timed out., retry(1/120).\n"
    assert told(ranks(r0=log, r1=log)) == ("", [])


def test_a_signal_to_one_worker() -> None:
    files = ranks(
        r0="DISTRIBUTED(21,7f,python):x This node 0 rank id: 0\n", r1="DISTRIBUTED(23,7f,python):x This node 1\n"
    )
    files |= {"msrun.log": f"{KILL_LINE}Worker process 23 exit with exception. Error code: -9.\n"}
    files |= {
        "scheduler.log": "[ERROR] DISTRIBUTED(20,7f,python):2026-03-01-10:00:40.1.1 x] The node: 0 is timed out. x\n"
    }
    files["rank_1.log"] = "[WARNING] DISTRIBUTED(23,7f,python):x] PostProcess] This node 1 rank id: 1\n"
    assert told(files) == ("killed", [1])


def test_a_crash_of_native_code_is_no_lack_of_memory() -> None:
    files = {"msrun.log": f"{KILL_LINE}Worker process 23 exit with exception. Error code: -11.\n"}
    assert told(files)[0] == "crashed"


def test_the_kernel_names_the_process() -> None:
    files = ranks(r2="[WARNING] DISTRIBUTED(77,7f,python):2026-03-01-10:00:00.1.1 x] This node 2 rank id: 2\n")
    files |= {"dmesg.log": "[Sun Mar  1 10:05:00 2026] Out of memory: Killed process 77 (python) total-vm:1kB\n"}
    files |= ranks(r0=hccl(70, "10:35:00", "The wait execution of the Notify register times out"))
    assert told(files) == ("kernel-oom", [2])


def test_an_exception_of_one_rank_and_timeouts_of_the_others() -> None:
    waits = hccl(70, "10:35:00", "The wait execution of the Notify register times out")
    own = "2026-03-01 10:05:00 step 7\nTraceback (most recent call last):\nKeyError: 'tokens'\n"
    assert told(ranks(r0=waits, r1=own, r2=waits)) == ("py-exception", [1])


def test_a_traceback_s_own_source_is_not_quoted() -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "data.py", line 12, in read\n'
        "    raise FileNotFoundError(path) from None\n"
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/17.bin'\n"
    )
    cause = verdict_on(ranks(r0=log)).cause
    assert cause is not None
    assert [event.place.line for event in cause.events] == [4]


def test_the_earliest_of_two_exceptions() -> None:
    log = "2026-03-01 10:{minute}:00 x\nTraceback (most recent call last):\nValueError: {what}\n"
    files = ranks(r0=log.format(minute="09", what="late"), r1=log.format(minute="02", what="early"))
    assert told(files) == ("py-exception", [1])


def test_a_port_that_only_a_warning_names() -> None:
    bind = (
        "[WARNING] DISTRIBUTED(9,7f,python):2026-03-01-10:00:00.1.1 Listen] Failed to call "
        "bind, url: h:1 Address already in use\n"
    )
    worker = "[ERROR] DISTRIBUTED(10,7f,python):2026-03-01-10:00:20.1.1 x] Building networking for MS_WORKER failed.\n"
    assert told({"scheduler.log": bind, "worker_0.log": worker, "worker_1.log": worker}) == ("ms-scheduler-port", [])


def test_another_collective() -> None:
    files = ranks(
        r0=task(1, "10:00:00", "AllReduce"), r1=task(2, "10:00:00", "AllReduce"), r2=task(3, "10:00:00", "AllGather")
    )
    assert told(files) == ("other-collective", [2])


def test_one_behind() -> None:
    files = ranks(**{f"r{i}": task(i + 1, "10:00:00", "AllReduce", 8 if i == 3 else 9) for i in range(4)})
    assert told(files) == ("behind", [3])


def test_watchdogs_tell_who_is_behind() -> None:
    line = (
        "[rank{r}]: [Rank {r}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum={n}, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000) ran for 600100 "
        "milliseconds\n"
    )
    log = "".join(line.format(r=rank, n=6 if rank == 1 else 7) for rank in range(4))
    assert told({"console.log": log}) == ("behind", [1])


def test_the_same_collective_decides_nothing_but_when() -> None:
    line = (
        "[rank{r}]:[E301 13:00:25.1 x.cpp:1] [Rank {r}] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=3600000) ran for 3600100 "
        "milliseconds\n"
    )
    verdict = verdict_on({"console.log": "".join(line.format(r=rank) for rank in range(2))})
    assert verdict.cause is not None
    assert (verdict.cause.rule.id, verdict.is_decided, verdict.confidence) == ("same-collective", False, "low")
    assert "12:00:25" in verdict.cause.values["since"]


def chain(*edges: tuple[int, str]) -> dict[str, str | bytes]:
    size = len(edges)
    entry = "Entry-HcclCommInitRootInfo:ranks[{n}], rank[{r}], rootinfo: host ip[1] identifier[g0], deviceLogicId[0]"
    return ranks(
        **{
            f"r{rank}": hccl(rank + 1, "09:00:00", entry.format(n=size, r=rank)) + remote(rank + 1, "10:00:00", peer)
            for rank, peer in edges
            if peer
        },
        **{f"r{rank}": hccl(rank + 1, "09:00:00", entry.format(n=size, r=rank)) for rank, peer in edges if not peer},
    )


def test_chains_of_waiting() -> None:
    assert told(chain((0, "1"), (1, "2"), (2, ""))) == ("chain-end", [2])
    assert told(chain((0, "1"), (1, "2"), (2, "local"))) == ("own-device", [2])
    assert told(chain((0, "1"), (1, "2"), (2, "0"))) == ("cycle?", [])


def test_a_group_s_own_numbers_are_no_global_ranks() -> None:
    line = (
        "EI0002: [PID: 5] x Notify register times out. remote rank:[3]. group information: "
        "[group:[g7], x, rankSize[4], rankId[1]]\n"
    )
    log = f"[ERROR] 2026 (PID:5, Device:0, RankID:101) ERR00100 PTA\n{line}"
    assert told({"rank_101.log": log})[1] == []


def test_one_reports_much_later() -> None:
    files = ranks(
        r0=task(1, "10:00:00", "AllReduce"), r1=task(2, "10:00:01", "AllReduce"), r2=task(3, "10:06:00", "AllReduce")
    )
    assert told(files) == ("late", [2])


def test_one_wrong_time_makes_nobody_late() -> None:
    odd = task(3, "10:40:00", "AllReduce") + task(3, "10:00:02", "AllReduce")
    files = ranks(r0=task(1, "10:00:00", "AllReduce"), r1=task(2, "10:00:01", "AllReduce"), r2=odd)
    assert told(files)[0].endswith("?")


def test_one_ended_after_fewer_steps() -> None:
    ring = (
        "[ERROR] DISTRIBUTED({pid},7f,python):2026-03-01-10:00:30.1.1 x] RunRingAllReduce] "
        "Ring ReduceScatter wait receiving [{peer},9] failed.\n"
    )
    files = ranks(
        r0=ring.format(pid=1, peer=2) + WAIT,
        r1=ring.format(pid=2, peer=0) + WAIT,
        r2="step 4\nrank 2 training finished\n",
    )
    assert told(files) == ("uneven-steps", [2])


def test_one_stopped_without_a_word() -> None:
    here = "[WARNING] DISTRIBUTED(8,7f,python):2026-03-01-10:00:00.1.1 x] This node 1 rank id: 1\nstep 3\n"
    assert told(ranks(r0=WAIT, r1=here, r2=WAIT, r3=WAIT)) == ("vanished", [1])


def test_one_is_busy() -> None:
    waits = hccl(70, "10:35:00", "The wait execution of the Notify register times out")
    assert told(ranks(r0="evaluating 500 of 9000\n", r1=waits, r2=waits)) == ("busy", [0])


def test_who_did_not_meet() -> None:
    log = hccl(1, "10:02:00", "topo exchange server get socket timeout! timeout[120 s]")
    log += hccl(1, "10:02:00", "need connect rankNum is [4]")
    log += hccl(1, "10:02:00", "connected rankinfo[LINE 0]: [0000000000000000],[0000000000000002];")
    assert told(ranks(r0=log)) == ("not-connected", [1, 3])


def test_who_came_late() -> None:
    entry = (
        "Entry-HcclCommInitRootInfo:ranks[3], rank[{r}], rootinfo: host ip[1] port[1] identifier[g0], deviceLogicId[0]"
    )
    files = ranks(
        **{f"r{r}": hccl(r, clock, entry.format(r=r)) for r, clock in enumerate(["10:00:00", "10:00:01", "10:05:00"])}
    )
    assert told(files) == ("late-start", [2])


def test_heartbeats_point_at_a_device() -> None:
    line = (
        "Cluster Exception Location[IP/ID]:[10.1.1.1/3], Arrival Time:[Sun Mar  1 09:59:00 "
        "2026], ExceptionType:[Heartbeat Lost Occurred]"
    )
    assert told(ranks(r0=hccl(1, "10:00:00", line))) == ("hccl-heartbeat-lost", [3])


def test_the_sender_in_a_ring() -> None:
    line = (
        "[ERROR] DISTRIBUTED(3,7f,python):2026-03-01-10:00:30.1.1 x] RunRingAllReduce] Memcpy "
        "error, errorno(162), dest size is 4, src size is 8\n"
    )
    files = ranks(r0="rank 0 of 3\n", r1="rank 1 of 3\n", r2=f"rank 2 of 3\n{line}")
    assert told(files) == ("ring-sender", [1])


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        (
            (
                "22.00 MiB (NPU 0; 60.00 GiB total capacity; 9.00 GiB already allocated; 20.00 MiB "
                "free; 10.00 GiB reserved in total"
            ),
            "oom-foreign",
        ),
        (
            (
                "2.00 GiB (NPU 0; 60.00 GiB total capacity; 56.00 GiB already allocated; 1.00 GiB "
                "free; 57.00 GiB reserved in total"
            ),
            "oom-real",
        ),
        (
            (
                "4.00 GiB (NPU 0; 60.00 GiB total capacity; 48.00 GiB already allocated; 1.00 GiB "
                "free; 57.00 GiB reserved in total"
            ),
            "oom-fragments",
        ),
        (
            (
                "900.00 GiB (NPU 0; 60.00 GiB total capacity; 8.00 GiB already allocated; 50.00 GiB "
                "free; 9.00 GiB reserved in total"
            ),
            "oom-absurd",
        ),
    ],
)
def test_out_of_memory(figures: str, cause: str) -> None:
    assert told(ranks(r3=(f"RuntimeError: NPU out of memory. Tried to allocate {figures} by PyTorch)\n"))) == (
        cause,
        [3],
    )


def test_memory_of_newer_torch() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 "
        "GiB of which 1.25 GiB is free. Including non-PyTorch memory, this process has 77.00 "
        "GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and "
        "5.00 GiB is reserved by PyTorch but unallocated."
    )
    short = shortage_of(text)
    assert short is not None
    assert [round(v / 2**30, 2) for v in (short.request, short.total, short.allocated, short.reserved)] == [
        2,
        79.15,
        70,
        75,
    ]


def test_a_shard_and_a_whole() -> None:
    text = (
        "RuntimeError: The size of tensor a (4096) must match the size of tensor b (1024) at "
        "non-singleton dimension 0\n"
    )
    verdict = verdict_on(ranks(r1=text))
    assert verdict.cause is not None
    assert (verdict.cause.rule.id, verdict.cause.values["ratio"]) == ("shape-is-shard", "4")
    assert told(ranks(r1=text.replace("1024", "1000"))) == ("torch-size", [1])


def test_clocks_are_set_right() -> None:
    lines = "".join(f"2026-03-01 10:0{{m}}:{s:02d} step {s} done\n" for s in range(6))
    own = "2026-03-01 10:{at} x\nTraceback (most recent call last):\nValueError: {what}\n"
    files = ranks(
        r0=lines.format(m=0) + own.format(at="01:00", what="follows"),
        r1=lines.format(m=0),
        r2=lines.format(m=3) + own.format(at="03:50", what="first"),
    )
    verdict = verdict_on(files)
    assert verdict.cause is not None
    assert verdict.cause.ranks == (2,)
    assert verdict.evidence.offsets_s == {"rank_2.log": 180.0}


def test_deciding_is_linear() -> None:
    rules = matcher()
    text = "[ERROR] HCCL(1,p):" + "remote rank:[" * 50_000
    assert rules.matches(text, "ERROR")


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("EI0077: [PID: 1] 2026-03-01-10:00:00.100.200 the group was left", "general-code-hccl?"),
        ("EL0077: [PID: 1] 2026-03-01-10:00:00.100.200 there are none left", "general-code-driver"),
        ("EL9977: [PID: 1] 2026-03-01-10:00:00.100.200 there are none left", ""),
        ("call aclnnNew, error code is 161077", "general-code-operator"),
        ("E30077: the port is occupied, bind failed", "general-port"),
        ("EZ9999: Inner Error! op[X], the data has the wrong shape", "general-shape"),
        ("[ERROR] ROCE(71,python):2026-03-01-10:00:00.100.200 [a.c:1] upside down", "unknown-link"),
        ("[ERROR] HCCL(71,python):2026-03-01-10:00:00.100.200 [a.c:1] upside down", "unknown-hccl?"),
        ("[INFO] HCCL(71,python):2026-03-01-10:00:00.100.200 [a.c:1] link is down, port is down", ""),
        ("INFO 03-01 10:00:00 [core.py:1] errors: a checkpoint with missing key is corrupt", ""),
    ],
)
def test_families_and_words_decide_where_no_rule_knows_a_line(line: str, rule: str) -> None:
    assert told({"x.log": f"{line}\n"})[0] == rule


def test_a_traceback_without_a_time_comes_before_what_follows_it() -> None:
    log = "RuntimeError: it has a wrong shape\n[ERROR] 2026-03-01-10:00:00 (PID:1) upside down\n"
    assert told({"x.log": log})[0] == "general-shape"
