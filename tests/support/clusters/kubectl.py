"""A stand-in for kubectl and the API server behind it: objects in a file, which schemas validate.

No registry has a server of Kubernetes, and Debian's kubectl is older than the fields in use. So
this program answers the calls that pipeworker makes as a cluster would: it rejects what the
published schemas do not have, what a strict policy forbids, and names that exist; it gives objects
a uid, and removes what a deleted object owned.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

STORE = "PIPEWORKER_TESTS_CLUSTER"
VERSION = "1.31"

Object = dict[str, Any]


def admit(found: Object) -> None:
    """Reject an object that the schemas or the policy of a platform do not allow."""
    name = f"{found['kind']} {found['metadata']['name']}"
    try:
        kubernetes_validate.validate(found, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(map(str, error.path))
        sys.exit(f'error: error validating "STDIN": {name}: {where}: {error.message}')
    if found["kind"] != "Job":
        return
    pod = found["spec"]["template"]["spec"]
    for container in pod["containers"]:
        if "memory" not in container["resources"].get("limits", {}):
            sys.exit(f"error: admission webhook denied {name}: a container has no memory limit")
    if any(
        "sizeLimit" not in volume.get("emptyDir", {"sizeLimit": ""}) for volume in pod["volumes"]
    ):
        sys.exit(f"error: admission webhook denied {name}: an emptyDir has no sizeLimit")


class Cluster:
    """The objects of a namespace, by kind and name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.objects: dict[str, Object] = json.loads(path.read_text()) if path.exists() else {}

    def save(self) -> None:
        self._path.write_text(json.dumps(self.objects))

    @staticmethod
    def key(kind: str, name: str) -> str:
        return f"{kind.lower()}/{name}"

    def put(self, found: Object, *, new: bool) -> Object:
        key = self.key(found["kind"], found["metadata"]["name"])
        if new and key in self.objects:
            sys.exit(f"Error from server (AlreadyExists): {key} already exists")
        uids = {one["metadata"]["uid"] for one in self.objects.values()}
        for owner in found["metadata"].get("ownerReferences", ()):
            if owner["uid"] not in uids:
                sys.exit(f"Error from server: {key}: its owner does not exist")
        found["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": "default"}
        self.objects[key] = found
        return found

    def delete(self, key: str) -> None:
        """Delete an object, and what it owns."""
        uid = self.objects.pop(key)["metadata"]["uid"]
        for other, one in list(self.objects.items()):
            owners = one["metadata"].get("ownerReferences", ())
            if other in self.objects and any(owner["uid"] == uid for owner in owners):
                self.delete(other)


def main() -> None:
    verb, *words = sys.argv[1:]
    cluster = Cluster(Path(os.environ[STORE]))
    if verb in ("apply", "create"):
        sent = [one for one in yaml.safe_load_all(sys.stdin.read()) if one]
        for one in sent:
            admit(one)
        if "--dry-run=server" in words:
            return
        made = [cluster.put(one, new=verb == "create") for one in sent]
        print(json.dumps(made[-1]))
    elif verb == "get" and "--selector" in words:
        kind, label = words[0], words[words.index("--selector") + 1]
        name, _, value = label.partition("=")
        items = [
            one
            for one in cluster.objects.values()
            if one["kind"].lower() == kind and one["metadata"]["labels"].get(name) == value
        ]
        print(json.dumps({"items": items}))
    elif verb == "get":
        key = cluster.key(*words[:2])
        print(key if key in cluster.objects else "")
    elif verb == "delete":
        key = cluster.key(*words[:2])
        if key in cluster.objects:
            cluster.delete(key)
    cluster.save()


if __name__ == "__main__":
    main()
