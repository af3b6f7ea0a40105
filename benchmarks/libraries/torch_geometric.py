# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch_geometric==2.8.1", "torch==2.14.1", "grpcio==1.85.1", "cloudpickle==3.1.2",
# ]
# ///
"""[PyTorch Geometric](https://github.com/pyg-team/pytorch_geometric)

Mind: Slices and `shuffle()` return new Datasets: call them first. `NeighborLoader` has no Dataset,
so it stays as it is.
Compared: order, edges; at random: positions
"""

import torch
from torch_geometric import seed_everything
from torch_geometric import transforms as T
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCN, global_mean_pool

from batches import seen
from feed import RemoteDataset  # added


class Graphs(InMemoryDataset):
    def __init__(self, transform=None):
        super().__init__("data", transform)
        self.load(self.processed_paths[0])

    @property
    def processed_file_names(self):
        return ["graphs.pt"]

    def process(self):
        graphs = []
        for number in range(30):
            nodes = 4 + number % 5
            edges = torch.randint(nodes, (2, 3 * nodes))
            graphs.append(Data(pos=torch.rand(nodes, 3), edge_index=edges, y=number))
        self.save(graphs, self.processed_paths[0])


seed_everything(1)
transform = T.Compose([T.RandomJitter(0.05), T.RandomRotate(180), T.Distance()])
dataset = Graphs(transform)[:24]
dataset = RemoteDataset(dataset)  # added
loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
model = GCN(3, 8, 2, 30)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    for batch in loader:
        graphs = batch.to_data_list()
        edges = [graph.edge_index for graph in graphs]
        seen(epoch, batch.y, edges, random=[(g.pos, g.edge_attr) for g in graphs])
        out = global_mean_pool(model(batch.pos, batch.edge_index), batch.batch)
        loss = torch.nn.functional.cross_entropy(out, batch.y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
