/* The header must stay C: a kernel driver includes it. */
#include "proxy/gpu/command_set.h"

unsigned dxgpu_c_command_bytes(void) {
  union dxgpu_command command = {.fence = {.header = {.opcode = DXGPU_OP_FENCE}, .value = 1}};
  return command.header.opcode == DXGPU_OP_FENCE ? sizeof command : 0;
}
