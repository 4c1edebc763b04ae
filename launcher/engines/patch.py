"""Strategic merge patches of Kubernetes objects, as ``kubectl patch`` applies them. Pure.

The rules are those of the Kubernetes documentation, "Update API Objects in Place Using kubectl
patch": objects are merged field by field, a list whose elements have a key is merged by it, and
every other list is replaced. null, or an element with ``$patch: delete``, removes.
"""

from __future__ import annotations

from typing import Any

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "replicatedJobs": "name",
}
"""The keys of list elements: ``x-kubernetes-patch-merge-key`` of the published schemas."""
_DIRECTIVE = "$patch"


def merge(value: Any, patch: Any, name: str = "") -> Any:
    """Return `value`, the field `name` of an object, with a patch applied."""
    if isinstance(patch, dict):
        replaced = patch.get(_DIRECTIVE) == "replace"
        result = dict(value) if isinstance(value, dict) and not replaced else {}
        for field, one in patch.items():
            if one is None:
                result.pop(field, None)
            elif field != _DIRECTIVE:
                result[field] = merge(result.get(field), one, field)
        return result
    if isinstance(patch, list) and name in _KEYS:
        return _merge_list(value if isinstance(value, list) else [], patch, _KEYS[name])
    return patch


def _merge_list(value: list[Any], patch: list[Any], key: str) -> list[Any]:
    result = list(value)
    for one in patch:
        if not isinstance(one, dict) or key not in one:  # the cluster rejects it
            result.append(one)
            continue
        at = next((i for i, old in enumerate(result) if old.get(key) == one[key]), None)
        old = [] if at is None else [result.pop(at)]
        if one.get(_DIRECTIVE) != "delete":
            merged = merge(old[0] if old else None, one)
            result.insert(len(result) if at is None else at, merged)
    return result
