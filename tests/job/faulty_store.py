"""An object store in memory, with faults: `faulty://bucket/…`, through fsspec and pyarrow as any other.

An object appears whole when its upload ends, and the last upload wins; there are no renames, no directories.
"""

from __future__ import annotations

import io
import threading
import time
from collections import Counter
from typing import ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem


class Faults:
    """fail, truncate: part of a name → how many uploads of it still go wrong. hidden: whether a name is
    missing from listings. put_s: seconds of an upload."""

    def __init__(self):
        self.fail, self.truncate = Counter(), Counter()
        self.hidden = lambda name: False
        self.put_s = 0.0

    def strikes(self, counter, name):
        for piece in counter:
            if piece in name and counter[piece] > 0:
                counter[piece] -= 1
                return True
        return False


class FaultyStore(AbstractFileSystem):
    protocol = "faulty"
    cachable = False

    objects: ClassVar[dict[str, bytes]] = {}
    puts: ClassVar[Counter[str]] = Counter()
    faults = Faults()
    lock = threading.Lock()
    uploading = most_uploading = 0

    @classmethod
    def reset(cls):
        cls.objects, cls.puts, cls.faults = {}, Counter(), Faults()
        cls.uploading = cls.most_uploading = 0

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("faulty://").strip("/")

    def info(self, path, **kwargs):
        path = self._strip_protocol(path)
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in list(self.objects)):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path)
        names = [
            name
            for name in list(self.objects)
            if name.startswith(f"{path}/") and not self.faults.hidden(name)
        ]
        below = {f"{path}/{name[len(path) + 1 :].split('/')[0]}" for name in names}
        found = [self.info(name) for name in sorted(below)]
        return found if detail else [entry["name"] for entry in found]

    def _open(self, path, mode="rb", **kwargs):
        path = self._strip_protocol(path)
        if mode == "rb":
            if path not in self.objects:
                raise FileNotFoundError(path)
            return io.BytesIO(self.objects[path])
        return Upload(self, path)

    def put_object(self, path, data):
        cls, faults = type(self), self.faults
        with cls.lock:
            cls.uploading += 1
            cls.most_uploading = max(cls.most_uploading, cls.uploading)
        time.sleep(faults.put_s)
        with cls.lock:
            cls.uploading -= 1
            cls.puts[path] += 1
            if faults.strikes(faults.fail, path):
                raise OSError("the store answers 503: slow down")
            cls.objects[path] = data[: len(data) // 2] if faults.strikes(faults.truncate, path) else data

    def rm_file(self, path):
        if self.objects.pop(self._strip_protocol(path), None) is None:
            raise FileNotFoundError(path)

    _rm = rm_file

    def mkdir(self, path, create_parents=True, **kwargs):
        pass

    def makedirs(self, path, exist_ok=False):
        pass

    def rmdir(self, path):
        pass


class Upload(io.BytesIO):
    """Visible when it is closed."""

    def __init__(self, store, path):
        super().__init__()
        self._store, self._path = store, path

    def close(self):
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._store.put_object(self._path, data)


fsspec.register_implementation("faulty", FaultyStore, clobber=True)
