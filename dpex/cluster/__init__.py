"""Everything that touches Ray; nothing outside this package imports it.

connect:     which Ray, from head_address
local_nodes: Ray's nodes on this host
client:      a trainer that is no node of its cluster
tokens:      who may talk to a Ray of our own
limits:      what this process may use of its host
embedded:    a Ray of our own where there is none
forkserver:  its workers, as forks of the trainer; forked_worker asks for them
keeper:      one Ray for all ranks of a host
versions:    does the cluster run what we run
host:        the actor that runs the pipeline, so that the trainer's process need not
turns:       which task makes which chunk
sharing:     when a trainer starts no task because those of others wait
stages:      a Ray Dataset from chunks, and its map_batches stage
blocks:      the blocks' way into the trainer: iter_torch_batches
session:     what one loader holds of all this
metrics:     what it counts, as Ray's metrics
liveness:    whether the nodes live that an answer depends on
releasing:   what Ray is told when an object of ours goes
private:     Ray's private names, all of them
"""
