module {
  func.func @main(%arg0: tensor<2x16xf32> {nmm.weight = "low.0.weight"}, %arg1: tensor<8x2xf32> {nmm.weight = "low.1.weight"}, %arg2: tensor<4x16xf32> {nmm.input = "x"}) -> tensor<4x24xf32> {
    %0 = stablehlo.custom_call @nmm_lowrank_matmul_d90cfa94(%arg2, %arg0, %arg1) {api_version = 4 : i32, backend_config = {nmm.family = "lowrank", nmm.op = "lowrank_matmul", nmm.operands = [0, 1, 2], nmm.out_layout = "row", nmm.spec = "{\22activation\22: \22identity\22, \22base\22: false, \22bias\22: false, \22dtype\22: \22float32\22, \22inner_activation\22: \22identity\22, \22inner_bias\22: false, \22inner_eps\22: 1e-06, \22inner_norm\22: false, \22k\22: 16, \22m\22: 4, \22n\22: 8, \22out_layout\22: \22row\22, \22r\22: 2, \22scale\22: 1.0, \22u_layout\22: \22col\22, \22v_layout\22: \22col\22, \22w_layout\22: \22row\22, \22x_layout\22: \22row\22}", nmm.target = "trn2", nmm.x_layout = "row"}} : (tensor<4x16xf32>, tensor<2x16xf32>, tensor<8x2xf32>) -> tensor<4x8xf32>
    %1 = stablehlo.concatenate %0, %arg2, dim = 1 : (tensor<4x8xf32>, tensor<4x16xf32>) -> tensor<4x24xf32>
    return %1 : tensor<4x24xf32>
  }
}
