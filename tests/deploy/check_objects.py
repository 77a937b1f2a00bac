"""Check rendered objects strictly; run with Kubernetes' schemas on the path.

    python check_objects.py FILE VERSION

Objects of Kubernetes are checked against its own schemas of that version, in which unknown fields
are errors; custom resources against `crds`, and the pods in them as pods.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.deploy.crds import SPECS


def main() -> None:
    """Print every fault, and at last the number of objects that were checked."""
    import jsonschema  # type: ignore[import-untyped, import-not-found, unused-ignore]
    import kubernetes_validate  # type: ignore[import-not-found, unused-ignore]

    objects: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for found in objects:
        where = f"{found['kind']} {found['metadata']['name']}"
        schema = SPECS.get((found["apiVersion"], found["kind"]))
        try:
            if schema is None:
                kubernetes_validate.validate(found, sys.argv[2], strict=True)
                continue
            jsonschema.validate(found["spec"], schema)
            template = found["spec"].get("leaderWorkerTemplate", {}).get("workerTemplate")
            if template is not None:
                pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
                kubernetes_validate.validate(
                    {**pod, "template": template}, sys.argv[2], strict=True
                )
        except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
            print(f"{where}: {error}")
    print(f"{len(objects)} objects")


if __name__ == "__main__":
    main()
