"""Values with tensors that pass between a worker and the process that reads its data.

A message is a pickle, which has numbers in place of tensors, and the bytes of their storages. Both
processes were forked by one agent and run the same job file; no other can connect to them. Large
messages are in an unnamed file in memory, which the receiver maps: it copies nothing, and a message
that is kept can be sent to several receivers.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import socket
from contextlib import closing
from itertools import accumulate
from struct import Struct
from typing import Any

import torch

from pipeworker.errors import PipeworkerError, a_type
from pipeworker.worker.transport.layout import ALIGNMENT

_MOST_INLINE = 1 << 15
"""Bytes of a message that is sent without a file."""
_LONGEST = 1 << 17
_HEAD = Struct("<2q")
"""Length of the pickle, and number of the storages; their lengths follow, then the pickle."""
_INLINE, _FILE = b"\0", b"\1"


class CannotPass(PipeworkerError):
    """A value cannot pass to another process."""


class _Pickler(pickle.Pickler):
    """A pickler that replaces tensors by tuples, and collects their storages.

    A tuple is the number of the tensor, then that of its storage.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}  # of storages, by address
        self._tensors: dict[int, int] = {}  # numbers of tensors, by id

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        if not plain or value.is_quantized or value.is_conj() or value.is_neg():
            raise CannotPass(f"{a_type(value)} of a kind that cannot pass")
        if value.device.type != "cpu":
            raise CannotPass(f"a tensor is on {value.device}")
        storage = value.untyped_storage()
        number = self._numbers.setdefault(storage.data_ptr(), len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        tensor = self._tensors.setdefault(id(value), len(self._tensors))
        place = value.storage_offset(), tuple(value.shape), value.stride()
        return tensor, number, value.dtype, place, value.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes | bytearray, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(io.BytesIO(data))
        self.storages = storages
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, found: Any) -> torch.Tensor:
        tensor, number, dtype, place, requires_grad = found
        if tensor not in self._tensors:
            made = torch.empty(0, dtype=dtype, device="cpu").set_(self.storages[number], *place)
            self._tensors[tensor] = made.data.requires_grad_(requires_grad)
        return self._tensors[tensor]


class Packed:
    """A message that can be sent several times, until it is closed.

    Raises:
        CannotPass: the value cannot pass to another process.
        OSError: there is no memory, or no descriptor.
    """

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        try:
            pickler.dump(value)
        except CannotPass:
            raise
        except Exception as error:  # of the user's classes
            raise CannotPass(f"it cannot be pickled: {error!r:.300}") from None
        plain, storages = file.getvalue(), pickler.storages
        lengths = [storage.nbytes() for storage in storages]
        head = _HEAD.pack(len(plain), len(lengths)) + Struct(f"<{len(lengths)}q").pack(*lengths)
        parts = [head + plain, *map(_bytes_of, storages)]
        *starts, self.size = _starts([len(head) + len(plain), *lengths])
        self._file: int | None = None
        self._inline = b""
        if self.size <= _MOST_INLINE:
            inline = bytearray(self.size)
            for start, part in zip(starts, parts, strict=True):
                inline[start : start + len(part)] = part
            self._inline = bytes(inline)
            return
        self._file = os.memfd_create("pipeworker-data", os.MFD_CLOEXEC)
        try:
            for start, part in zip(starts, parts, strict=True):
                view = memoryview(part)
                while view:
                    written = os.pwrite(self._file, view, start)
                    start, view = start + written, view[written:]
        except OSError:
            self.close()
            raise

    def send(self, connection: socket.socket) -> None:
        """Send the message.

        Raises:
            OSError: the receiver is gone.
        """
        if self._file is None:
            connection.send(_INLINE + self._inline)
        else:
            socket.send_fds(connection, [_FILE], [self._file])

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._inline = b""


def send(connection: socket.socket, value: Any) -> None:
    """Send a value once.

    Raises:
        CannotPass: it cannot pass to another process.
        OSError: the receiver is gone.
    """
    with closing(Packed(value)) as packed:
        packed.send(connection)


def receive(connection: socket.socket) -> Any:
    """Receive a value. Changes of its tensors are not seen by the sender, nor by other receivers.

    Raises:
        CannotPass: it cannot be made again in this process.
        EOFError: the sender is gone.
        OSError: there is no memory, or no descriptor.
    """
    try:
        message, files, _, _ = socket.recv_fds(connection, _LONGEST, 1)
    except ConnectionError:
        raise EOFError from None
    if not message:
        raise EOFError
    if not files:
        if message == _FILE:  # the system has dropped the descriptor
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return _unpack(bytearray(message[1:]))
    try:
        # The sender does not write it again. A page is copied when a tensor on it is changed.
        return _unpack(mmap.mmap(files[0], 0, access=mmap.ACCESS_COPY))
    finally:
        os.close(files[0])


def _unpack(data: bytearray | mmap.mmap) -> Any:
    length, count = _HEAD.unpack_from(data)
    lengths = Struct(f"<{count}q")
    sizes = lengths.unpack_from(data, _HEAD.size)
    begin = _HEAD.size + lengths.size
    _, *starts, _ = _starts([begin + length, *sizes])
    storages = [_storage(data, start, size) for start, size in zip(starts, sizes, strict=True)]
    try:
        return _Unpickler(data[begin : begin + length], storages).load()
    except Exception as error:  # of the user's classes
        raise CannotPass(f"it cannot be unpickled: {error!r:.300}") from None


def _storage(data: bytearray | mmap.mmap, start: int, size: int) -> torch.UntypedStorage:
    """Return the storage at a place, at an aligned address."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    found = torch.frombuffer(data, dtype=torch.uint8, offset=start, count=size)
    return (found.clone() if isinstance(data, bytearray) else found).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return whole.numpy().data


def _starts(lengths: list[int]) -> list[int]:
    """Return where each part of these lengths begins, aligned, and the end of all."""
    padded = [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]
    return [0, *accumulate(padded)]
