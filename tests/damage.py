"""Damages to a checkpoint folder, by accident or on purpose.

Manifests that were edited carry a fresh checksum, as somebody who means harm would make one; otherwise the checksum
would refuse them all and hide the checks behind it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.checkpoint import store
from ascend_moe_train.errors import CheckpointError

ZERO_SHA256 = hashlib.sha256(b"").hexdigest()
Damage = Callable[[Path], None]


def seal(content: dict[str, Any]) -> bytes:
    """The manifest's text with a checksum that matches it."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def edit(change: Callable[[dict[str, Any]], object]) -> Damage:
    """A damage that changes the parsed manifest and seals it again."""

    def damage(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())
        change(content)
        (path / "manifest.json").write_bytes(seal(content))

    return damage


def set_key(key: str, value: object) -> Damage:
    return edit(lambda content: content.update({key: value}))


def set_tensor(name: str, **values: object) -> Damage:
    return edit(lambda content: content["tensors"].setdefault(name, {}).update(values))


def set_piece(name: str, **values: object) -> Damage:
    return edit(lambda content: content["tensors"][name]["pieces"][0].update(values))


def add_piece(name: str, **values: object) -> Damage:
    """One that is like the first, but for `values`."""

    def change(content: dict[str, Any]) -> None:
        pieces = content["tensors"][name]["pieces"]
        pieces.append({**pieces[0], **values})

    return edit(change)


def set_extra(name: str, size_bytes: int = 3) -> Damage:
    return edit(lambda content: content.update(extras={name: {"size_bytes": size_bytes, "sha256": ZERO_SHA256}}))


def with_extra_file(data: bytes) -> Damage:
    def damage(path: Path) -> None:
        set_extra("config.json")(path)
        (path / "huggingface").mkdir()
        (path / "huggingface" / "config.json").write_bytes(data)

    return damage


def extras_behind_a_link(path: Path) -> None:
    set_extra("config.json")(path)
    (path.parent.parent / "elsewhere").mkdir()
    (path / "huggingface").symlink_to(path.parent.parent / "elsewhere")


def replace_text(old: str, new: str) -> Damage:
    def damage(path: Path) -> None:
        text = (path / "manifest.json").read_text()
        assert text.count(old) == 1
        (path / "manifest.json").write_text(text.replace(old, new))

    return damage


def write(file: str, text: bytes) -> Damage:
    def damage(path: Path) -> None:
        (path / file).write_bytes(text)

    return damage


def truncate(file: str, drop_bytes: int) -> Damage:
    return lambda path: os.truncate(path / file, (path / file).stat().st_size - drop_bytes)


def flip(file: str, offset: int) -> Damage:
    """Flips one bit, `offset` bytes from the start or, when negative, from the end."""

    def damage(path: Path) -> None:
        data = bytearray((path / file).read_bytes())
        data[offset] ^= 4
        (path / file).write_bytes(bytes(data))

    return damage


def link_out(file: str) -> Damage:
    """Moves a file out of the folder and leaves a symbolic link to it."""

    def damage(path: Path) -> None:
        outside = path.parent.parent / "outside"
        shutil.move(path / file, outside)
        (path / file).symlink_to(outside)

    return damage


def replace_by(file: str, make: Callable[[Path], None]) -> Damage:
    def damage(path: Path) -> None:
        (path / file).unlink()
        make(path / file)

    return damage


def assert_refused(checkpoint: Path, expected: str) -> None:
    """Loading it fails with one short line that starts with the file and says what is expected."""
    with pytest.raises(CheckpointError) as caught:
        store.load(checkpoint)
    message = str(caught.value)
    assert message.startswith(str(checkpoint / expected.split(":")[0]))
    assert expected in message
    assert "\n" not in message and len(message) < len(str(checkpoint)) + 400
