"""Ray: placement, rank actors, the pull queue, launch, watch and rebuild. Nothing below knows Ray."""
