"""HTTP as every resource has it: who asks, what may be asked and how it is answered; nothing about one resource.

The rooms below the API may be imported, and no resource of it.
"""
