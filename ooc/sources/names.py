# SPDX-License-Identifier: Apache-2.0
"""Datasets by name: where their files usually lie under a root folder, and where they are published.

Addresses are the publishers' own: ``master.csv`` and ``ogb/lsc/mag240m.py`` of github.com/snap-stanford/ogb,
``igb/download*`` of github.com/IllinoisGraphBenchmark/IGB-Datasets, DGL's and PyG's dataset modules. Only IGB publishes
checksums, for its smaller sizes; OGB's zips contain checksums, which conversion verifies.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ooc.errors import BudgetError, OptionError, SourceError
from ooc.events import Listener, ignore
from ooc.sizes import format_size
from ooc.suggestions import did_you_mean

if TYPE_CHECKING:  # Names alone need no network.
    from ooc.sources.files.download import Served

_OGB = "http://snap.stanford.edu/ogb/data"
_OGB_FOLDERS = {"ogbn": "nodeproppred", "ogbl": "linkproppred"}
_LSC = "https://dgl-data.s3-accelerate.amazonaws.com/dataset/OGB-LSC"
_IGB = "https://igb-public.s3.us-east-2.amazonaws.com"
_PLANETOID = "https://github.com/kimiyoung/planetoid/raw/master/data"
_DGL = "https://data.dgl.ai/dataset"
_FINE_LABELS = "processed/paper/node_label_2K.npy"
_PAPER_FILES = (
    "processed/paper__cites__paper/edge_index.npy",
    "processed/paper/node_label_19.npy",
    _FINE_LABELS,
    "processed/paper/node_feat.npy",
)
_PLANETOID_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A file on the web, and its path under the root.

    ``unpacked``: what it is unpacked to there. ``optional``: the dataset can be used without it.
    """

    url: str
    path: str
    md5: str | None = None
    unpacked: str | None = None
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset with a name, and its published counts; ``edges`` as ogb's, IGB's or PyG's loader counts them.

    ``places``: paths under the root, the preferred one first. A place of several files is a folder, and ``files`` are
    below the first place.
    """

    name: str
    nodes: int
    edges: int
    features: int
    places: tuple[str, ...]
    files: tuple[Published, ...]

    def find(self, root: Path) -> Path | None:
        """Return the first place that exists and is complete; None where there is none."""
        return next((path for place in self.places if (path := root / place).exists() and self._has_all(path)), None)

    def _has_all(self, path: Path) -> bool:
        """Return whether all files of a place exist, as downloads fetch one after another."""
        if len(self.files) == 1:
            return True
        needed = (file.path.removeprefix(f"{self.places[0]}/") for file in self.files if not file.optional)
        return all((path / file).exists() or (path / Path(file).name).exists() for file in needed)


def _ogb(name: str, download_name: str, **counts: int) -> Dataset:
    folder, packed = name.replace("-", "_"), f"{download_name}.zip"
    return Dataset(
        name=name,
        **counts,
        places=(folder, download_name, f"{folder}/{download_name}", packed, f"{folder}.zip"),
        files=(Published(url=f"{_OGB}/{_OGB_FOLDERS[name[:4]]}/{packed}", path=packed),),
    )


def _igb_archive(size: str, *, md5: str, **counts: int) -> Dataset:
    packed = f"igb_homogeneous_{size}.tar.gz"
    return Dataset(
        name=f"igb-{size}",
        **counts,
        features=1024,
        places=(size, f"igb/{size}", f"igb-{size}"),
        files=(Published(url=f"{_IGB}/igb-homogeneous/{packed}", path=packed, md5=md5, unpacked=size),),
    )


def _igb_files(name: str, size: str, address: str, **counts: int) -> Dataset:
    files = tuple(
        Published(url=f"{_IGB}/{address}/{file}", path=f"{size}/{file}", optional=file == _FINE_LABELS)
        for file in _PAPER_FILES
    )
    places = (size, f"igb/{size}", name)
    return Dataset(name=name, **counts, features=1024, places=places, files=files)


def _planetoid(name: str, folder: str, **counts: int) -> Dataset:
    files = tuple(
        Published(url=f"{_PLANETOID}/ind.{name}.{part}", path=f"{name}/raw/ind.{name}.{part}")
        for part in _PLANETOID_PARTS
    )
    places = (name, folder, f"Planetoid/{folder}", f"planetoid/{name}")
    return Dataset(name=name, **counts, places=places, files=files)


DATASETS = {
    dataset.name: dataset
    for dataset in (
        _ogb("ogbn-arxiv", "arxiv", nodes=169_343, edges=1_166_243, features=128),
        _ogb("ogbn-products", "products", nodes=2_449_029, edges=123_718_280, features=100),
        _ogb("ogbn-proteins", "proteins", nodes=132_534, edges=79_122_504, features=8),
        _ogb("ogbn-papers100M", "papers100M-bin", nodes=111_059_956, edges=1_615_685_872, features=128),
        _ogb("ogbn-mag", "mag", nodes=1_939_743, edges=21_111_007, features=128),
        _ogb("ogbl-collab", "collab", nodes=235_868, edges=2_358_104, features=128),
        _ogb("ogbl-ppa", "ppassoc", nodes=576_289, edges=42_463_862, features=58),
        _ogb("ogbl-citation2", "citation-v2", nodes=2_927_963, edges=30_387_995, features=128),
        _ogb("ogbl-ddi", "ddi", nodes=4_267, edges=2_135_822, features=0),
        Dataset(
            name="mag240m",
            nodes=121_751_666,
            edges=1_297_748_926,
            features=768,
            places=("mag240m_kddcup2021", "mag240m", "mag240m/mag240m_kddcup2021", "mag240m_kddcup2021.zip"),
            files=(Published(url=f"{_LSC}/mag240m_kddcup2021.zip", path="mag240m_kddcup2021.zip"),),
        ),
        _igb_archive("tiny", nodes=100_000, edges=547_416, md5="34856534da55419b316d620e2d5b21be"),
        _igb_archive("small", nodes=1_000_000, edges=12_070_502, md5="6781c699723529902ace0a95cafe6fe4"),
        _igb_archive("medium", nodes=10_000_000, edges=120_077_694, md5="4640df4ceee46851fd18c0a44ddcc622"),
        _igb_files("igb-large", "large", "large", nodes=100_000_000, edges=1_223_571_364),
        _igb_files("igb260m", "full", "IGBH", nodes=269_346_174, edges=3_995_777_033),
        _planetoid("cora", "Cora", nodes=2_708, edges=10_556, features=1_433),
        _planetoid("citeseer", "CiteSeer", nodes=3_327, edges=9_104, features=3_703),
        _planetoid("pubmed", "PubMed", nodes=19_717, edges=88_648, features=500),
        Dataset(
            name="reddit",
            nodes=232_965,
            edges=114_615_892,
            features=602,
            places=("reddit", "reddit/raw", "Reddit/raw", "Reddit", "reddit.zip"),
            files=(Published(url=f"{_DGL}/reddit.zip", path="reddit.zip"),),
        ),
    )
}
ALIASES = {"igb-full": "igb260m"}
_BY_FOLDER_ONLY = ("igbh-tiny", "igbh-small", "igbh-medium", "igbh-large", "igbh600m")


def dataset(name: str, *, root: str | Path = "data", download: bool = False, listener: Listener = ignore) -> Path:
    """Return the path of the dataset ``name`` under ``root``, for ``convert``; ``download``: fetch it if it is missing.

    OptionError for an unknown name, and where the dataset is missing and ``download`` is not given.
    """
    found = _by_name(name)
    if found is None:
        raise OptionError(
            f"there is no dataset {name!r}; known are {', '.join(DATASETS)}{did_you_mean(name, DATASETS)}"
        )
    return obtain(found, Path(root), confirm=lambda question: download, listener=listener)


def named(source: str) -> Dataset | None:
    """Return the dataset that is called ``source``; None for an unknown name, or where a file or folder has that
    name."""
    return None if Path(source).exists() else _by_name(source)


def _by_name(name: str) -> Dataset | None:
    """Return the dataset of a name, ignoring case; raise SourceError for one that is converted from its folder only."""
    if name.lower() in _BY_FOLDER_ONLY:
        raise SourceError(f"{name} has no files that are fetched by name; convert its folder with types='all'")
    lowered = {known.lower(): known for known in (*DATASETS, *ALIASES)}
    known = lowered.get(name.lower())
    return DATASETS[ALIASES.get(known, known)] if known is not None else None


def obtain(dataset: Dataset, root: Path, *, confirm: Callable[[str], bool], listener: Listener) -> Path:
    """Return the path of ``dataset`` under ``root``; if it is missing and ``confirm`` agrees, download it first.

    ``confirm`` is asked with one line that says what is downloaded from where. SourceError where the publisher cannot
    be reached; its message says which file to put where.
    """
    from ooc.sources.files.download import probe

    found = dataset.find(root)
    if found is not None:
        return found
    missing = [file for file in dataset.files if not (root / file.path).exists()]
    by_hand = f"put {', '.join(file.path for file in missing)} into {root}, or give root=FOLDER, where it is"
    try:
        served = [probe(file.url) for file in missing]
    except SourceError as error:
        raise SourceError(f"{dataset.name} is not under {root} and {error}; {by_hand}") from error
    if missing:
        size, host = sum(answer.size for answer in served), missing[0].url.split("/")[2]
        if not confirm(f"download {dataset.name}, {format_size(size)}, from {host} to {root}"):
            what = f"{dataset.name} is not under {root}; it takes a download of {format_size(size)} from {host}"
            raise OptionError(f"{what}: give download=True, or {by_hand}")
        _check_room(dataset, missing, size, root)
    _fetch(dataset, missing, served, root, listener)
    found = dataset.find(root)
    assert found is not None, "its files were put at one of its places"
    return found


def _check_room(dataset: Dataset, files: list[Published], size: int, root: Path) -> None:
    """Raise BudgetError where the disk has no room for all ``files``, less what an earlier download left of them."""
    parts = (root / f"{file.path}.part" for file in files)
    need = size - sum(512 * part.stat().st_blocks for part in parts if part.exists())
    root.mkdir(parents=True, exist_ok=True)
    if need > (free := shutil.disk_usage(root).free):
        raise BudgetError(f"{dataset.name} needs {format_size(need)} of disk in {root}, {format_size(free)} are free")


def _fetch(dataset: Dataset, files: list[Published], served: "list[Served]", root: Path, listener: Listener) -> None:
    from ooc.sources.files.download import download, unpack

    for file, answer in zip(files, served, strict=True):
        download(file.url, root / file.path, md5=file.md5, served=answer, listener=listener)
    for file in dataset.files:
        if file.unpacked is not None:
            unpack(root / file.path, root / file.unpacked, listener=listener)
            if file in files:  # Files from elsewhere stay.
                (root / file.path).unlink()
