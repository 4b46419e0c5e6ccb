"""Damaged and malicious model folders: one line that names the file and the tensor, and nothing is left behind."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.cli import main as cli
from tests.hf_folders import DTYPES, golden_model, write_folder

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"
GATE = "model.layers.0.mlp.experts.0.gate_proj.weight"

Damage = Callable[[Path], object]
Header = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of bfloat16; the index says which holds what."""
    return write_folder(tmp_path / "hf", *golden_model("qwen3_moe_tiny"), shards=2)


def file_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / INDEX).read_text())
    return folder / index["weight_map"][tensor]


def parts(path: Path) -> tuple[Header, bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def put_together(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)


def edit_header(tensor: str, change: Callable[[Header], object]) -> Damage:
    """Changes the header of the file that holds a tensor; the data stays."""

    def damage(folder: Path) -> None:
        path = file_of(folder, tensor)
        header, data = parts(path)
        change(header)
        put_together(path, json.dumps(header).encode(), data)

    return damage


def set_entry(tensor: str, **values: object) -> Damage:
    return edit_header(tensor, lambda header: header[tensor].update(values))


def edit_tensors(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Writes the folder again with other tensors."""

    def damage(folder: Path) -> None:
        config, tensors = golden_model("qwen3_moe_tiny")
        change(tensors)
        write_folder(folder.parent / "new", config, tensors, shards=2)
        for path in (folder.parent / "new").iterdir():
            path.replace(folder / path.name)
        (folder.parent / "new").rmdir()

    return damage


def edit_config(**values: object) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | values
        kept = {key: value for key, value in config.items() if value != "REMOVED"}
        (folder / "config.json").write_text(json.dumps(kept))

    return damage


def edit_index(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def truncate(folder: Path) -> None:
    path = folder / TWO
    os.truncate(path, path.stat().st_size - 100)


def link_out(folder: Path) -> None:
    secret = folder.parent / "secret.safetensors"
    (folder / TWO).rename(secret)
    (folder / TWO).symlink_to(secret)


def in_both(folder: Path) -> None:
    """A tensor of the one file also in the other."""
    path = file_of(folder, NORM)
    header, data = parts(path)
    other = folder / (ONE if path.name == TWO else TWO)
    more_header, more_data = parts(other)
    start, stop = header[NORM]["data_offsets"]
    end = len(more_data)
    more_header[NORM] = {**header[NORM], "data_offsets": [end, end + stop - start]}
    put_together(other, json.dumps(more_header).encode(), more_data + data[start:stop])


def twice_in_a_header(folder: Path) -> None:
    path = file_of(folder, NORM)
    header, data = parts(path)
    text = json.dumps(header)[:-1] + f', "{NORM}": {json.dumps(header[NORM])}}}'
    put_together(path, text.encode(), data)


def overlapping(header: Header) -> None:
    """One expert's tensor claims the bytes of another's."""
    one, other = sorted(name for name in header if name.endswith("experts.1.up_proj.weight") or "experts.2.up" in name)[
        :2
    ]
    header[other]["data_offsets"] = header[one]["data_offsets"]


def swap_shapes(tensors: dict[str, Any]) -> None:
    tensors[EXPERT] = np.ascontiguousarray(tensors[EXPERT].T)


def spoil(tensor: str, value: float) -> Damage:
    def change(tensors: dict[str, Any]) -> None:
        tensors[tensor] = tensors[tensor].copy()
        tensors[tensor].reshape(-1)[-1] = value

    return edit_tensors(change)


def replaced(name: str, make: Callable[[Path], object]) -> Damage:
    """Something else under the name of a file."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def replace_shards_by_a_pickle(folder: Path) -> None:
    for name in (ONE, TWO, INDEX):
        (folder / name).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def without_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def set_bytes(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data)


def raw_header(header: bytes, length: int | None = None) -> Damage:
    return lambda folder: put_together(folder / ONE, header, b"\0" * 8, length)


def to_int(tensors: dict[str, Any]) -> None:
    tensors[NORM] = tensors[NORM].astype(np.int32)


def to_half(tensors: dict[str, Any]) -> None:
    tensors[GATE] = tensors[GATE].astype(DTYPES["F16"])


def move_entry(index: dict[str, Any]) -> None:
    index["weight_map"][NORM] = ONE if index["weight_map"][NORM] == TWO else TWO


# name -> (what to do to a good folder, what the one line must hold besides the folder)
CASES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    # files and index
    "missing_shard": (lambda folder: (folder / TWO).unlink(), (TWO, "missing", INDEX)),
    "shard_is_a_folder": (replaced(TWO, Path.mkdir), (TWO, "not a regular file")),
    "shard_is_a_pipe": (replaced(TWO, os.mkfifo), (TWO, "not a regular file")),
    "shard_links_out": (link_out, (TWO, "a symbolic link out of the folder")),
    "config_links_out": (
        replaced("config.json", lambda path: path.symlink_to("/etc/passwd")),
        ("config.json", "a symbolic link out of the folder"),
    ),
    "truncated": (truncate, (TWO, "cut short", "tensor")),
    "bytes_appended": (lambda f: (f / TWO).open("ab").write(b"x"), (TWO, "accounts for")),
    "index_names_an_absent_tensor": (
        edit_index(lambda index: index["weight_map"].update({"model.ghost.weight": ONE})),
        (ONE, "'model.ghost.weight' is not there"),
    ),
    "index_leaves_a_tensor_out": (
        edit_index(lambda index: index["weight_map"].pop(NORM)),
        (f"'{NORM}' is there, but {INDEX} does not name it",),
    ),
    "index_names_the_wrong_file": (edit_index(move_entry), (f"'{NORM}'", INDEX)),
    "index_climbs_out": (
        edit_index(lambda index: index["weight_map"].update({NORM: "../secret.safetensors"})),
        (INDEX, f"'{NORM}' is in file '../secret.safetensors'; allowed"),
    ),
    "index_is_absolute": (
        edit_index(lambda index: index["weight_map"].update({NORM: "/etc/x.safetensors"})),
        (INDEX, f"'{NORM}' is in file '/etc/x.safetensors'"),
    ),
    "index_names_a_number": (
        edit_index(lambda index: index["weight_map"].update({NORM: 7})),
        (INDEX, f"'{NORM}' is in file 7"),
    ),
    "index_without_map": (edit_index(lambda index: index.pop("weight_map")), (INDEX, "weight_map is missing")),
    "index_not_json": (set_bytes(INDEX, b"{"), (INDEX, "not valid JSON")),
    "index_names_a_tensor_twice": (
        set_bytes(INDEX, b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'),
        (INDEX, "'a' occurs twice"),
    ),
    "no_index": (without_index, ("neither model.safetensors nor", ONE)),
    "single_file_and_index": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        ("has both model.safetensors and", INDEX),
    ),
    "only_a_pickle": (replace_shards_by_a_pickle, ("pytorch_model.bin", "a pickle", "make safetensors of it")),
    # headers
    "empty_file": (set_bytes(ONE, b""), (ONE, "too short")),
    "header_length_lies": (raw_header(b"{}", 2**40), (ONE, "its header has 1099511627776 bytes")),
    "header_giant": (raw_header(b"{}", 2**63), (ONE, "its header has 9223372036854775808 bytes")),
    "header_not_json": (raw_header(b"not json"), (ONE, "header is not valid JSON")),
    "header_not_utf8": (raw_header(b"\xff\xfe\xfd"), (ONE, "header is not valid JSON")),
    "header_deep": (raw_header(b"[" * 100_000), (ONE, "header is not valid JSON")),
    "header_is_a_list": (raw_header(b"[]"), (ONE, "allowed: a mapping")),
    "header_names_a_tensor_twice": (twice_in_a_header, (f"'{NORM}' occurs twice",)),
    "offsets_overlap": (edit_header(GATE, overlapping), ("tensor", "overlaps the one before it")),
    "offsets_beyond_the_shape": (set_entry(NORM, data_offsets=[0, 10**6]), (f"'{NORM}'", "but BF16")),
    "offsets_turned": (set_entry(NORM, data_offsets=[64, 0]), (f"'{NORM}'", "-64")),
    "offsets_missing": (edit_header(NORM, lambda header: header[NORM].pop("data_offsets")), (f"'{NORM}'", "entry")),
    "shape_negative": (set_entry(NORM, shape=[-32]), (f"'{NORM}'", "shape [-32]")),
    "shape_huge": (set_entry(NORM, shape=[2**62, 2**62]), (f"'{NORM}'", "shape [4611686018427387904")),
    "shape_of_floats": (set_entry(NORM, shape=[32.0]), (f"'{NORM}'", "shape [32.0]")),
    "shape_is_text": (set_entry(NORM, shape="32"), (f"'{NORM}'", "shape '32'")),
    "dtype_unknown": (set_entry(NORM, dtype="O"), (f"'{NORM}'", "dtype 'O'; allowed: F64")),
    "dtype_of_another_width": (set_entry(NORM, dtype="F32"), (f"'{NORM}'", "but F32")),
    # tensors
    "tensor_in_two_files": (in_both, (f"'{NORM}' is there, but {INDEX} says that it is in",)),
    "expert_missing": (edit_tensors(lambda tensors: tensors.pop(EXPERT)), (f"tensor {EXPERT} is missing",)),
    "expert_too_many": (
        edit_tensors(lambda t: t.update({EXPERT.replace("experts.2", "experts.8"): t[EXPERT]})),
        ("experts.8.down_proj.weight' is not a tensor of this model",),
    ),
    "expert_shapes_swapped": (edit_tensors(swap_shapes), (EXPERT, "has shape [12, 32]: the config asks for [32, 12]")),
    "tensor_misspelt": (
        edit_tensors(lambda tensors: tensors.update({"model.norms.weight": tensors.pop(NORM)})),
        (f"{NORM} is missing: 'model.norms.weight' is there instead",),
    ),
    "tensor_of_integers": (edit_tensors(to_int), (f"'{NORM}' is I32; allowed: F32",)),
    "parts_of_two_dtypes": (edit_tensors(to_half), (GATE, "must share a dtype")),
    "weight_is_nan": (spoil(EXPERT, float("nan")), (f"tensor '{EXPERT}'", "infinities or NaN", "--allow-nonfinite")),
    "embedding_is_infinite": (spoil(EMBED, float("-inf")), (f"tensor '{EMBED}'", "infinities or NaN")),
    "head_differs_from_its_tied_copy": (
        edit_tensors(lambda tensors: tensors.update({"lm_head.weight": tensors[EMBED] + tensors[EMBED]})),
        (f"'lm_head.weight' differs from '{EMBED}'",),
    ),
    # config
    "config_missing": (lambda folder: (folder / "config.json").unlink(), ("config.json: missing",)),
    "config_not_json": (set_bytes("config.json", b"{"), ("config.json: not valid JSON",)),
    "config_deep": (set_bytes("config.json", b"[" * 100_000), ("config.json: not valid JSON",)),
    "config_is_a_list": (set_bytes("config.json", b"[]"), ("config.json: []; allowed: a mapping",)),
    "config_key_missing": (edit_config(hidden_size="REMOVED"), ("config.json: hidden_size is missing",)),
    "config_type_error": (edit_config(num_hidden_layers="2"), ("config.json: num_hidden_layers", '"2"')),
    "config_layers_without_end": (
        edit_config(num_hidden_layers=10**9),
        ("config.json: num_hidden_layers", "1 to 1024"),
    ),
    "config_experts_disagree": (edit_config(num_local_experts=16, num_experts=16), ("experts.8", "is missing")),
    "architecture_unknown": (edit_config(model_type="mamba"), ("config.json: model_type", "mamba", "mixtral")),
    "quantised_otherwise": (
        edit_config(quantization_config={"quant_method": "awq"}),
        ("quantization_config.quant_method: 'awq' cannot be decoded",),
    ),
    "quantised_in_no_blocks": (
        edit_config(quantization_config={"quant_method": "fp8", "weight_block_size": [0, 128]}),
        ("quantization_config.weight_block_size: [0, 128]",),
    ),
    "quantisation_is_a_word": (edit_config(quantization_config="fp8"), ("quantization_config: 'fp8'",)),
}


def test_there_are_enough() -> None:
    assert len(CASES) >= 30


@pytest.mark.parametrize("case", CASES)
def test_refused_with_one_line_and_nothing_left(folder: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, expected = CASES[case]
    damage(folder)
    before = sorted(folder.parent.iterdir())
    assert cli.main(["convert", "import", str(folder), str(folder.parent / "out")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ") and output.err.count("\n") == 1 and len(output.err) < 600
    assert str(folder) in output.err
    for words in expected:
        assert words in output.err
    assert sorted(folder.parent.iterdir()) == before


def test_the_good_folder_is_good(folder: Path) -> None:
    assert cli.main(["convert", "import", str(folder), str(folder.parent / "out"), "--json"]) == 0


def test_nonfinite_weights_are_taken_if_asked_for(folder: Path) -> None:
    spoil(EXPERT, float("nan"))(folder)
    out = folder.parent / "out"
    assert cli.main(["convert", "import", str(folder), str(out), "--allow-nonfinite"]) == 0
    assert cli.main(["convert", "export", str(out), str(out) + "-back"]) == 2
    assert cli.main(["convert", "export", str(out), str(out) + "-back", "--allow-nonfinite"]) == 0


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_itself(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    assert cli.main(["convert", "import", str(tmp_path / name), str(tmp_path / "out")]) == 2
    assert f"{name}: a pickle, which can run any code" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["nothing", "a-file"])
def test_no_folder(tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a-file").write_text("")
    assert cli.main(["convert", "import", str(tmp_path / path), str(tmp_path / "out")]) == 2
    assert "folder" in capsys.readouterr().err


def test_an_output_that_is_there_is_not_touched(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "out"
    out.mkdir()
    assert cli.main(["convert", "import", str(folder), str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert list(out.iterdir()) == []


def test_the_hub_keeps_files_behind_links(tmp_path: Path) -> None:
    """models--x/snapshots/<revision>/file -> ../../blobs/<hash>: followed, but no further."""
    entry = tmp_path / "models--x"
    (entry / "blobs").mkdir(parents=True)
    snapshot = entry / "snapshots" / "abc"
    write_folder(snapshot, *golden_model("qwen3_moe_tiny"), shards=2)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(entry / "blobs" / str(number))
        path.symlink_to(Path("../../blobs") / str(number))
    assert cli.main(["convert", "import", str(snapshot), str(tmp_path / "out")]) == 0
    (snapshot / ONE).unlink()
    (tmp_path / "elsewhere").write_bytes(b"")
    (snapshot / ONE).symlink_to(tmp_path / "elsewhere")
    assert cli.main(["convert", "import", str(snapshot), str(tmp_path / "out2")]) == 2
