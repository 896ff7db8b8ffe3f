"""The DiLoCo algorithms on numbers and pytrees, with an index from the papers' lines to functions.

The table follows Streaming DiLoCo (arXiv 2501.18512), Algorithm 2. Function names are relative to
`maxdiloco`. The letters `theta` and `g` are the outer parameters and the outer gradient. Line 2
is the caller's loop around `step`.

| line | the paper                                       | function                              |
|------|-------------------------------------------------|---------------------------------------|
| 1    | for replicas m = 1 to M in parallel             | parallel.replicas.map_fn              |
| 2    | for inner steps t = 1 to T                      | engine.diloco.DiLoCo.step             |
| 3    | x ~ D_m                                         | data.order.indices                    |
| 4    | L = f(x, theta_m)                               | models.model.Model.loss               |
| 5    | theta_m = InnerOpt(theta_m, gradient of L)      | run.inner_step.make                   |
| 6    | if t - t_p mod H = 0 for a fragment p           | diloco.schedule.Schedule.is_sent      |
| 7    | g_m,p = theta_p - theta_m,p                     | diloco.outer.outer_gradient           |
| 8    | async-send the mean of g_m,p over m: encode     | engine.collective.send                |
| 8    | over the link                                   | engine.collective.all_gather_chunk    |
| 8    | the mean, computed on arrival                   | diloco.outer.ordered_mean             |
| 9    | if t - t_p - tau mod H = 0 for a fragment p     | diloco.schedule.Schedule.applies      |
| 10   | block-receive the mean                          | engine.collective.receive             |
| 11   | theta_p = OuterOpt(theta_p, mean)               | diloco.outer.outer_update             |
| 12   | theta_m,p = alpha theta_m,p + (1-alpha) theta_p | diloco.outer.merge                    |
| 3-12 | in this order, for one t and in every mode      | diloco.schedule.Schedule.actions      |

DiLoCo (arXiv 2311.08105), Algorithm 1 is the case of one fragment and tau = 0. Eager updates (arXiv
2502.12996), Algorithm 3 run lines 7-12 when a fragment is sent: engine.programs.eager_step. Each
replica then has its own outer parameters. The eager mean is engine.collective.receive_eager:
diloco.outer.eager_own_term chooses the replica's own g of this round, and the other replicas' g of
the previous round.

With error feedback, diloco.outer.add_residual adds the residual of earlier sends in line 7, and
diloco.outer.new_residual keeps the encoding error of line 8. Every receiver in line 10 uses the
decoded values; in eager mode this includes the sender itself.
"""
