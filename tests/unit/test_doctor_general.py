"""Messages of programs that no rule was written for: general words tell their kind.

They were written down before the doctor had seen them; it told 40 of the 52 then (docs/log.md).
"""

import pytest

from tests.doctored import verdict_on

LINES = (
    (
        "oom_host",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1234.0.",
    ),
    ("stopped", "slurmstepd: error: *** JOB 1234 ON node01 CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***"),
    ("oom_host", "srun: error: node01: task 3: Killed"),
    ("disk", "OSError: [Errno 122] Disk quota exceeded: '/home/u/ckpt/x.pt'"),
    ("disk", "OSError: [Errno 116] Stale file handle: '/mnt/nfs/data/a.bin'"),
    ("disk", "OSError: [Errno 30] Read-only file system: '/data/out'"),
    ("checkpoint", "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"),
    ("checkpoint", "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer"),
    (
        "checkpoint",
        "RuntimeError: Error(s) in loading state_dict for Llama: size mismatch for lm_head.weight",
    ),
    ("oom_device", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    ("oom_device", "hipErrorOutOfMemory: out of memory"),
    ("device_fault", "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."),
    ("network", "mlx5_core 0000:3b:00.0 ib0: Link down"),
    ("network", "socket.gaierror: [Errno -2] Name or service not known"),
    ("network", "ssh: connect to host node7 port 22: No route to host"),
    (
        "port_conflict",
        "RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98 - Address).",
    ),
    ("port_conflict", "grpc._channel: E0301 bind: address already in use 0.0.0.0:6006"),
    ("nan_overflow_loss", "FloatingPointError: Loss is nan at step 120"),
    (
        "nan_overflow_loss",
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
    ),
    ("shape_sharding", "AssertionError: num_attention_heads (30) must be divisible by tensor_model_parallel_size (8)"),
    ("shape_sharding", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x128 and 256x64)"),
    ("shape_sharding", "ValueError: expected sequence of length 10 at dim 1 (got 12)"),
    ("version_mismatch", "ImportError: /lib64/libc.so.6: version `GLIBC_2.34' not found (required by libx.so)"),
    ("version_mismatch", "ImportError: cannot import name 'packaging' from 'pkg_resources'"),
    ("version_mismatch", "ModuleNotFoundError: No module named 'flash_attn'"),
    ("version_mismatch", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
    ("data", "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    ("data", "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ("data", "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object>"),
    ("data", "IndexError: list index out of range in dataset __getitem__"),
    (
        "oom_host",
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error.",
    ),
    ("container", "PermissionError: [Errno 13] Permission denied: '/dev/davinci0'"),
    (
        "container",
        "docker: Error response from daemon: failed to create shim: OCI runtime create failed: nvidia-container-cli",
    ),
    ("config_env", "error: unrecognized arguments: --tensor-parallel 8"),
    ("config_env", "KeyError: 'HCCL_WHITELIST_FILE' environment variable must be set"),
    ("ranktable_hostfile", "ValueError: world size 16 is not equal to tp 4 x pp 2 x dp 3"),
    ("config_env", "mpirun was unable to find the specified executable file train.py on node node2"),
    (
        "ranktable_hostfile",
        "There are not enough slots available in the system to satisfy the 16 slots that were requested",
    ),
    ("peer_crash", "ORTE has lost communication with a remote daemon. node03"),
    (
        "collective_mismatch",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 runs ALLREDUCE",
    ),
    ("hccl_nccl_timeout", "Watchdog: rank 3 timed out waiting for ALLREDUCE after 600000 milliseconds"),
    (
        "hccl_nccl_timeout",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 7/8 clients joined.",
    ),
    ("device_fault", "EDAC MC0: 1 UE memory read error on CPU_SrcID#0 (channel:0 slot:0)"),
    ("device_fault", "npu-smi: health status of card 3: Alarm"),
    ("device_occupied", "NPU 3 is in use by process 7712, cannot be opened by another process"),
    ("device_occupied", "CUDA error: all CUDA-capable devices are busy or unavailable"),
    ("operator_or_memory", "CUDA error: an illegal memory access was encountered"),
    ("moe", "expert 5 receives no tokens for 200 steps: router collapse suspected (error level)"),
    ("slow", "ERROR: step time of rank 7 is 2.4x slower than the median, straggler detected"),
)
# Told as something near: what a peer did for the network between, or the other way around.
NEAR = (
    ("network", "ibv_create_qp failed: Cannot allocate memory, consider raising ulimit -l"),
    ("network", "ConnectionRefusedError: [Errno 111] Connection refused"),
    (
        "peer_crash",
        "RuntimeError: [1] is setting up NCCL communicator, but store->get('0') got error: Connection reset by peer",
    ),
)


@pytest.mark.parametrize(("group", "line"), LINES)
def test_its_kind_is_told(group: str, line: str) -> None:
    verdict = verdict_on({"x.log": f"{line}\n"})
    assert verdict.cause is not None
    assert verdict.cause.rule.group == group


@pytest.mark.parametrize(("group", "line"), NEAR)
def test_some_are_told_as_something_else(group: str, line: str) -> None:
    verdict = verdict_on({"x.log": f"{line}\n"})
    assert verdict.cause is not None
    assert verdict.cause.rule.group != group  # moves up, to the others, once it is told


@pytest.mark.parametrize(
    "line",
    [
        "relative error: 0.0012",
        "eval error: 0.13, errors: 0",
        "error_rate: 0.02 error: 0",
        "no error: all is well",
        "INFO: error: none",
    ],
)
def test_measures_are_no_errors(line: str) -> None:
    assert verdict_on({"x.log": f"{line}\n" + "step 1 loss 2.5\n"}).cause is None
