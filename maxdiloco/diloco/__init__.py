"""The algorithm: numbers and pytrees, nothing else. This page leads from the papers to the code.

Streaming DiLoCo (arXiv 2501.18512) Algorithm 2; names are those below `maxdiloco`. g is the outer
gradient. Line 2 is the caller's loop around `step`.

| line | the paper                                      | function                                |
|------|------------------------------------------------|-----------------------------------------|
| 1    | for replicas m = 1 to M in parallel            | parallel.replicas.map_fn                |
| 2    | for inner steps t = 1 to T                     | engine.diloco.DiLoCo.step               |
| 3    | x ~ D_m                                        | data.order.indices                      |
| 4    | L = f(x, theta_m)                              | models.transformer.Model.loss           |
| 5    | theta_m = InnerOpt(theta_m, gradient of L)     | trainer.inner_step.make                 |
| 6    | if t - t_p mod H = 0 for a fragment p          | diloco.schedule.Schedule.is_sent        |
| 7    | g_m,p = theta_p - theta_m,p                    | diloco.outer.outer_gradient             |
| 8    | async-send the mean of g_m,p over m            | exchange.collective.send                |
| 8    | over the link                                  | exchange.collective.all_gather_chunk    |
| 8    | the mean, taken on arrival                     | diloco.outer.ordered_mean               |
| 9    | if t - t_p - tau mod H = 0 for a fragment p    | diloco.schedule.Schedule.applies        |
| 10   | block-receive the mean                         | exchange.collective.receive             |
| 11   | theta_p = OuterOpt(theta_p, mean)              | diloco.outer.outer_update               |
| 12   | theta_m,p = alpha theta_m,p + (1-alpha) theta_p | diloco.outer.merge                     |
| 3-12 | in this order, for one t and in every mode     | diloco.schedule.Schedule.actions        |

DiLoCo (arXiv 2311.08105) Algorithm 1 is one fragment and tau = 0. Eager updates (arXiv 2502.12996)
Algorithm 3 takes lines 7-12 at the send, for each replica with a theta of its own:
exchange.collective.receive, given `own`, is its mean, in which diloco.outer.own_fresh puts the
replica's fresh g among the others' of the round before; engine.programs.outer_step_and_merge is
lines 11-12 of one replica there, and of all of them elsewhere.

Error feedback adds to line 7 what earlier sends have left over, diloco.outer.fed_back, and keeps
what line 8 leaves over, diloco.outer.left_over. Every receiver of line 10, in eager mode the
replica itself too, uses the values that were sent.
"""
