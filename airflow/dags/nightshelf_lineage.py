"""A run as OpenLineage sees it: tables read and written, with their rows, from the run's manifest.

Imported only where the openlineage provider calls for it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import urlsplit

from airflow.providers.openlineage.extractors import OperatorLineage
from openlineage.client.event_v2 import InputDataset, OutputDataset
from openlineage.client.facet_v2 import (
    input_statistics_input_dataset,
    output_statistics_output_dataset,
)

_Read = input_statistics_input_dataset.InputStatisticsInputDatasetFacet
_Written = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet


def lineage_of(run_dir: str) -> OperatorLineage:
    """Inputs and output of a published run."""
    manifest = json.loads((Path(run_dir) / "manifest.json").read_text())
    plan, published = manifest["plan"], manifest["published"]
    inputs = []
    for table in plan["inputs"].values():
        namespace, name = _dataset(os.path.commonpath([f["path"] for f in table["files"]]))
        rows = sum(file["rows"] for file in table["files"])
        facets = {"inputStatistics": _Read(rowCount=rows)}
        inputs.append(InputDataset(namespace=namespace, name=name, inputFacets=facets))
    namespace, name = _dataset(published["table"])
    facets = {"outputStatistics": _Written(rowCount=published["rows"])}
    output = OutputDataset(namespace=namespace, name=name, outputFacets=facets)
    return OperatorLineage(inputs=inputs, outputs=[output])


def _dataset(path: str) -> tuple[str, str]:
    """Namespace and name of a path or URL, as OpenLineage names files and objects."""
    url = urlsplit(path)
    if url.scheme in ("", "file"):
        return "file", url.path
    return f"{url.scheme}://{url.netloc}", url.path.lstrip("/")
