"""Everything that touches Ray; nothing outside this package imports it.

connect:     which Ray, from head_address
local_nodes: Ray's nodes on this host
limits:      what this process may use of its host
embedded:    a Ray of our own where there is none
forkserver:  its workers, as forks of the trainer; forked_worker asks for them
keeper:      one Ray for all ranks of a host
memory:      what a process's memory is mapped from
versions:    does the cluster run what we run
host:        the actor that runs the pipeline, so that the trainer's process need not
stages:      a Ray Dataset from chunks, and its map_batches stage
blocks:      the blocks' way into the trainer: iter_torch_batches
session:     what one loader holds of all this
private:     Ray's private names, all of them
"""
