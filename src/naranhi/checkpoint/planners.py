"""How `torch.distributed.checkpoint` (DCP) reads and writes our boxes: two planners.

DCP's own planners take tensors and `DTensor`s, with one shard of a tensor on a rank; a rank of ours
may have several boxes of one tensor. DCP tells boxes apart by their offsets alone: of two with the
same offset it writes only one, whatever their sizes. Therefore `layout` checks, before DCP starts,
that the boxes cover each tensor exactly once.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from naranhi.checkpoint.boxes import Box, Boxes


class SaveBoxes(DefaultSavePlanner):
    """A planner that writes a {name: Boxes}. The ranks' boxes cover each tensor exactly once."""

    plan: SavePlan

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """Return the boxes that this rank writes."""
        self.plan = SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, box.offset),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        _chunk(box), TensorProperties(boxes.dtype), torch.Size(boxes.shape)
                    ),
                )
                for name, boxes in self.state_dict.items()
                for box in boxes.views
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the values of a box."""
        return self.state_dict[index.fqn].at(index.offset)


class LoadBoxes(DefaultLoadPlanner):
    """A planner that fills the boxes of a {name: Boxes} from the overlapping boxes on disk."""

    state_dict: dict[str, Boxes]
    metadata: Metadata | None
    is_coordinator: bool

    def set_up_planner(
        self,
        state_dict: dict[str, Boxes],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Store the boxes to read and the metadata of the boxes on disk."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Return the overlaps of this rank's boxes with the boxes on disk."""
        return LoadPlan(
            [
                item
                for name, boxes in self.state_dict.items()
                for item in create_read_items_for_chunk_list(
                    name, self.metadata.state_dict_metadata[name], [*map(_chunk, boxes.views)]
                )
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory of a box."""
        return self.state_dict[index.fqn].at(index.offset)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.sizes))
