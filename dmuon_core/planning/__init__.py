"""What training a model on a mesh will take, predicted from names and shapes: owners, memory, traffic, time.

Nothing here needs the devices that it is about. `python -m dmuon_core plan --help` is the way in.

    source.py     where a model's shapes come from     shapes.py   the shapes
    shapes_file.py, json_file.py   what people write
    layout.py     the shapes on a mesh, with owners    memory.py, traffic.py   exact figures of one rank
    hardware.py   what a machine can do                timing.py   the schedule of one step, simulated
    recommend.py  the best layout of several           report.py, plot.py, cli.py   for people
"""
