"""Copying between global storage and an instance: as the user, in parallel, proved, resumable.

    transfer     what callers use: the values, and a whole transfer on this machine (`copy_local`)
    coordinator  one per transfer: what is to do, who does it, what is proved          (parent, may be root)
    begin        before that: the journal is read, the scanner started and told         (parent, may be root)
    worker       one per node: copier processes that do what the coordinator hands out  (parent, may be root)
    journal      the record that makes a transfer resumable                             (parent, may be root)
    scan, copier the programs that touch files, each a fresh process of the user        (child)
    engine       ordinary entries by the thousand: `_native` (C), or `portable`         (parts of the children)
    spool, tree, data, metadata, proof, wire, causes

The parents never open a path that comes from a user's tree, and the children never run as anyone else than
the user. Nothing here knows of Slurm, of the rendezvous, or of how an instance lives.

This file imports nothing: the children's start is in every job's time.
"""
