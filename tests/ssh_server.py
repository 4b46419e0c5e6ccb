"""An SSH server inside the test's own process: it answers what it is told to, and starts nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import asyncssh
import pytest

Handler = Callable[[asyncssh.SSHServerProcess[bytes]], Awaitable[None]]


class Home:
    """A user's ~/.ssh with one key, and a server's own key."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ssh = folder / ".ssh"
        self.ssh.mkdir(parents=True)
        self.server_key = asyncssh.generate_private_key("ssh-ed25519")
        user_key = asyncssh.generate_private_key("ssh-ed25519")
        user_key.write_private_key(self.ssh / "id_ed25519")
        self.authorized = asyncssh.import_authorized_keys(user_key.export_public_key().decode())
        monkeypatch.setenv("HOME", str(folder))
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)

    def know(self, name: str, key: asyncssh.SSHKey | None = None) -> None:
        """Adds a line to known_hosts."""
        with (self.ssh / "known_hosts").open("a") as file:
            file.write(f"{name} {(key or self.server_key).export_public_key().decode()}")

    @contextlib.asynccontextmanager
    async def serve(self, handler: Handler) -> AsyncIterator[int]:
        """The port on 127.0.0.1 on which commands are answered."""
        server = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[self.server_key],
            authorized_client_keys=self.authorized,
            process_factory=handler,
            encoding=None,
        )
        try:
            yield server.get_port()
        finally:
            server.close()
            await server.wait_closed()


async def say_command(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Answers with the command itself, then with what it was given."""
    process.stdout.write((process.command or "").encode() + b"|" + await process.stdin.read())
    process.stderr.write(b"err")
    process.exit(3)


async def say_nothing(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Never ends."""
    await asyncio.sleep(3600)
