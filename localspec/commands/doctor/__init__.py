"""``localspec doctor``: does a pair fit this machine, does it match, does it pay?

``facts`` holds and looks at machine and engines, ``fit`` examines model files before anything is loaded, ``ranking``
measures passes and tries candidates, ``command`` runs all and reports.
"""
